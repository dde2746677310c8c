"""Pipeline parallelism: a stage of a transformers model in torch's own 1F1B schedule."""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


class Stage(nn.Module):
    """Some blocks of a decoder; the first stage embeds, the last one has the head."""

    def __init__(self, model: Any, number: int, stages: int) -> None:
        super().__init__()
        layers = model.model.layers
        each = -(-len(layers) // stages)
        self.embed = model.model.embed_tokens if number == 0 else None
        self.layers = nn.ModuleList(layers[number * each : (number + 1) * each])
        self.rotary_emb = model.model.rotary_emb
        self.norm, self.head = (model.model.norm, model.lm_head) if number == stages - 1 else (None, None)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Tokens or hidden states in, hidden states or logits out."""
        if self.embed is not None:
            hidden = self.embed(hidden)
        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        table = self.rotary_emb(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=table, position_ids=positions)
        return hidden if self.head is None else self.head(self.norm(hidden))


def pipelined(
    model: Any, mesh: DeviceMesh, options: argparse.Namespace, materialized: Callable[[nn.Module], nn.Module]
) -> tuple[nn.Module, Callable[[], None]]:
    """This rank's stage, and what runs one step of the schedule."""
    number, stages = mesh["pp"].get_local_rank(), mesh["pp"].size()
    module = materialized(Stage(model, number, stages))
    device = torch.device("cuda", torch.cuda.current_device())
    stage = PipelineStage(module, number, stages, device, group=mesh["pp"].get_group())
    batch = options.global_batch // (mesh["copies"].size() * mesh["shard"].size())
    count = batch // options.micro_batch

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return model.loss_function(logits, labels, vocab_size=model.config.vocab_size)  # type: ignore[no-any-return]

    schedule = Schedule1F1B(stage, n_microbatches=count, loss_fn=loss_of)

    def step() -> None:
        ids = torch.randint(0, 1000, (batch, options.seq), device=device)
        inputs = (ids,) if number == 0 else ()
        schedule.step(*inputs, target=ids if number == stages - 1 else None, return_outputs=False)

    return module, step
