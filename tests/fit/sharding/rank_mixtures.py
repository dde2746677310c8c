"""What one rank does with models and batches as people mix them: frozen parts, adapters, empty batches, another world.

As in `rank_programs`, every program gets its rank and a folder, and returns plain data.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fit.cases import CASES, Case, build_training
from fit.cases import take_step as take_plain_step
from fit.sharding.rank_programs import (
    LAYERS,
    _against_all,
    difference,
    fit,
    mine,
    one_dimension,
    ragged,
    ragged_batch,
    replicas_and_shards,
)
from tonnage.fit.sharding.shard import Shard
from tonnage.fit.stepping.batches import BadBatch, take_rows
from tonnage.fit.technique import Technique
from tonnage.fit.techniques.micro_batches import MicroBatches
from tonnage.fit.techniques.recompute import Recompute


class Adapted(nn.Module):
    """A frozen linear layer with two small matrices beside it that train, as LoRA has them."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = (
            nn.Linear(base.in_features, rank, bias=False),
            nn.Linear(rank, base.out_features, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.up(self.down(x))
        return out


def adapters() -> Case:
    """Nothing trains but the adapters of two layers: whole blocks and the embedding are frozen."""
    model, batch, loss = CASES["llama"]()
    model.requires_grad_(False)
    for layer in list(model.model.layers)[:2]:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
    return model, batch, loss


def partly_frozen() -> Case:
    """A frozen embedding, a frozen block, and a block in which one matrix is frozen."""
    model, batch, loss = CASES["llama"]()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    model.model.layers[1].self_attn.q_proj.requires_grad_(False)
    return model, batch, loss


def frozen(rank: int, folder: Path) -> Any:
    """Worst differences of losses and parameters from one process, for each way to shard."""
    ways: dict[str, list[Technique]] = {
        "stage 3": [Shard(), Recompute(modes=dict.fromkeys(LAYERS, "block"))],
        "stage 2": [Shard(stage=2, gradients="each"), MicroBatches(count=2)],
        "on the host": [Shard(offload=True)],
    }
    builds = {"adapters": adapters, "partly frozen": partly_frozen}
    return {
        f"{name}, {way}": _differences(rank, build, techniques)
        for name, build in builds.items()
        for way, techniques in ways.items()
    }


def _differences(rank: int, build: Callable[[], Case], techniques: list[Technique]) -> Any:
    training, plain = (build_training(build, clip_norm=0.1) for _ in range(2))
    trained = [parameter.requires_grad for parameter in training.model.parameters()]
    fitted = fit(training, one_dimension(), *techniques)
    batch = mine(training.sample, rank)
    losses = [difference([fitted.step(batch)], [take_plain_step(plain, step)]) for step in range(2)]
    fitted.undo()
    return {
        "difference": max(*losses, difference(training.model.parameters(), plain.model.parameters())),
        "still frozen": trained == [parameter.requires_grad for parameter in training.model.parameters()],
    }


def empty(rank: int, folder: Path) -> Any:
    """A loader that gives some ranks a batch without rows, in the middle and at the end."""
    none = take_rows(ragged_batch(1), slice(0, 0))
    rounds = [
        [ragged_batch(0), none],
        [none, ragged_batch(1)],
        [ragged_batch(2), ragged_batch(3)],
        [ragged_batch(4), none],
    ]
    return _against_all(rank, rounds, Shard(), MicroBatches(count=2))


def empty_everywhere(rank: int, folder: Path) -> Any:
    """No rank has rows: all are told, and train on."""
    training, plain = (build_training(ragged) for _ in range(2))
    fitted = fit(training, one_dimension(), Shard())
    try:
        fitted.step(take_rows(ragged_batch(1), slice(0, 0)))
        words = "nothing"
    except BadBatch as error:
        words = str(error)
    found = fitted.step(training.sample)
    return {"words": words, "loss": difference([found], [take_plain_step(plain, 0)])}


def loader_raises(rank: int, folder: Path) -> None:
    """Outside of any step, inside the loop that ranks are joined for."""
    training = build_training(CASES["llama"])
    fitted = fit(training, one_dimension(), Shard())
    with fitted.joined():
        for step in range(4):
            if rank == 1 and step == 2:
                raise FileNotFoundError("part 2 of the data")
            fitted.step(mine(training.sample, rank))


def all_leave(rank: int, folder: Path) -> Any:
    """Every rank leaves the loop by an error of its own making: that is nobody's failure, and training goes on."""
    training, plain = (build_training(CASES["llama"]) for _ in range(2))
    fitted = fit(training, one_dimension(), Shard())
    batch = mine(training.sample, rank)
    try:
        with fitted.joined():
            fitted.step(batch)
            raise KeyError("enough")
    except KeyError:
        pass
    take_plain_step(plain, 0)
    return difference([fitted.step(batch)], [take_plain_step(plain, 1)])


def saved(rank: int, folder: Path) -> None:
    """A step, and a checkpoint in shards for worlds of other sizes."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict

    training = build_training(CASES["llama"])
    fitted = fit(training, one_dimension(), Shard())
    fitted.step(mine(training.sample, rank))
    model, optimizer = get_state_dict(training.model, training.optimizer)
    checkpoint.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder.parent / "step-1")


def resumed(rank: int, folder: Path) -> Any:
    """The checkpoint of two ranks goes on as one process does: on four, sharded and hybrid."""
    meshes = {"shards": one_dimension, "replicas and shards": replicas_and_shards}
    return {name: _resumed(rank, folder.parent / "step-1", make()) for name, make in meshes.items()}


def _resumed(rank: int, checkpoint_folder: Path, mesh: Any) -> float:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    training, plain = (build_training(CASES["llama"]) for _ in range(2))
    for parameter in training.model.parameters():
        nn.init.zeros_(parameter)
    fitted = fit(training, mesh, Shard(stage=2, weighting="ranks"))
    model, optimizer = get_state_dict(training.model, training.optimizer)
    checkpoint.load({"model": model, "optimizer": optimizer}, checkpoint_id=checkpoint_folder)
    set_state_dict(training.model, training.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    take_plain_step(plain, 0)
    loss = difference([fitted.step(mine(training.sample, rank))], [take_plain_step(plain, 1)])
    return max(loss, difference(training.model.parameters(), plain.model.parameters()))
