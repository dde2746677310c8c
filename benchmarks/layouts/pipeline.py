"""Pipeline parallelism: stages of a transformers model in torch's own schedules, 1F1B and interleaved."""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from tensor_plan import splits_loss
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B


class Stage(nn.Module):
    """Some blocks of a decoder; the first stage embeds, the last one has the head."""

    def __init__(self, model: Any, number: int, stages: int, seq: int) -> None:
        super().__init__()
        self.seq = seq  # hidden states may be split along it
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
        positions = torch.arange(self.seq, device=hidden.device).unsqueeze(0)
        table = self.rotary_emb(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=table, position_ids=positions)
        return hidden if self.head is None else self.head(self.norm(hidden))


def pipelined(
    model: Any, mesh: DeviceMesh, options: argparse.Namespace, materialized: Callable[[nn.Module], nn.Module]
) -> tuple[nn.Module, Callable[[], None]]:
    """This rank's stages, and what runs one step of the schedule."""
    number, ranks = mesh["pp"].get_local_rank(), mesh["pp"].size()
    count = ranks * options.pp_chunks
    modules = nn.ModuleDict(
        {str(n): materialized(Stage(model, n, count, options.seq)) for n in range(number, count, ranks)}
    )
    device = torch.device("cuda", torch.cuda.current_device())
    stages = [PipelineStage(part, int(n), count, device, group=mesh["pp"].get_group()) for n, part in modules.items()]
    batch = options.global_batch // (mesh["copies"].size() * mesh["shard"].size())
    passes = batch // options.micro_batch

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return model.loss_function(logits, labels, vocab_size=model.config.vocab_size)  # type: ignore[no-any-return]

    schedule: Any = (
        Schedule1F1B(stages[0], n_microbatches=passes, loss_fn=loss_of)
        if len(stages) == 1
        else ScheduleInterleaved1F1B(stages, n_microbatches=passes, loss_fn=loss_of)
    )

    def step() -> None:
        ids = torch.randint(0, 1000, (batch, options.seq), device=device)
        inputs = (ids,) if number == 0 else ()
        with splits_loss(options.tp > 1):
            schedule.step(*inputs, target=ids if number == ranks - 1 else None, return_outputs=False)

    return modules, step
