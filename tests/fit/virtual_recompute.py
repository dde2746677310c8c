"""Peaks of one step on the virtual GPU with blocks recomputed in several ways: a part of `virtual_peaks`."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tonnage.fit.choose.frontier import frontier
from tonnage.fit.recomputing import replay
from tonnage.fit.recomputing.operators import profile_operators, virtual_clock
from tonnage.fit.recomputing.sliced import first_calls
from tonnage.fit.stepping.stepper import Stepper
from tonnage.fit.survey.meter import card_of
from tonnage.fit.techniques.recompute import Recompute
from tonnage.fit.training import Training
from tonnage.virtual import virtual_gpu

WIDTH, ROWS, LENGTH, BLOCKS = 128, 16, 256, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, run: Callable[[Block, Tensor], Tensor] = Block.__call__) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.run(block, x)
        return x


def _training(net: Net) -> Training:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return Training(
        model=net,
        optimizer=optimizer,
        loss=lambda model, x: model(x).sum(),
        sample=torch.ones(ROWS, LENGTH, WIDTH, device="cuda"),
        device=torch.device("cuda"),
        stepper=Stepper(optimizer),
    )


def _peak_bytes(training: Training, recompute: Recompute | None = None) -> int:
    undo = recompute.apply(training) if recompute else lambda: None
    for _ in range(2):  # the first one learns
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        training.loss(training.model, training.sample).backward()
        training.optimizer.zero_grad()
    undo()
    return torch.cuda.max_memory_allocated() - before


def _placing_bytes(recompute: Recompute) -> int:
    """What trying the blocks takes, on a model whose blocks were not tried yet."""
    training = _training(Net().cuda())
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    recompute.apply(training)()
    return torch.cuda.max_memory_allocated() - before


def _choices(training: Training) -> list[list[str]]:
    name, block = "blocks.0", training.model.get_submodule("blocks.0")
    with torch.no_grad():
        (x,), _ = first_calls(training, {name: block})[name]
    operators = profile_operators(block, (x.requires_grad_(),), {}, virtual_clock(card_of(training.device)))
    return [choice.mode for choice in frontier(operators, 0, levels=4)]


def peaks() -> dict[str, Any]:
    """Bytes by setting. Small products, too, are left out where backward does not read them."""
    with mock.patch.object(replay, "_WORTHWHILE_OPERATIONS", 0), virtual_gpu("h200"):
        theirs = _training(Net(lambda block, x: checkpoint(block, x, use_reentrant=False)).cuda())  # type: ignore[arg-type]
        training = _training(Net().cuda())
        found: dict[str, Any] = {"checkpoint": _peak_bytes(theirs), "plain": _peak_bytes(training)}
        for slices in (1, 2, 4):
            found[f"slices={slices}"] = _peak_bytes(training, Recompute.all(training.model, slices=slices))
        names = [f"blocks.{index}" for index in range(BLOCKS)]
        modes = _choices(training)
        found["choices"] = [_peak_bytes(training, Recompute(modes=dict.fromkeys(names, mode))) for mode in modes]
        blocks = Recompute.all(training.model)
        by_operators = Recompute(modes=blocks.modes | {"blocks.0": modes[1]})
        found["placing"] = [_placing_bytes(recompute) for recompute in (blocks, by_operators)]
    return found
