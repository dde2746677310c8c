"""What steps take on the virtual GPU, with and without a technique.

In a process of its own: autograd's engine learns how many devices there are at the first backward pass, and other tests
have had theirs on the CPU. One process for all: it takes longer to start than to measure.

    cd tests; python -m fit.virtual_peaks
"""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fit import virtual_recompute
from fit.cases import CASES, build_training, take_step
from tonnage.fit.stepping.stepper import Stepper
from tonnage.fit.technique import Technique
from tonnage.fit.techniques.activation_offload import ActivationOffload
from tonnage.fit.techniques.chunked_loss import ChunkedLoss
from tonnage.fit.techniques.fp8 import Fp8Linear
from tonnage.fit.techniques.host_states import HostStates
from tonnage.fit.techniques.step_in_backward import StepInBackward
from tonnage.fit.techniques.weight_streaming import WeightStreaming
from tonnage.fit.training import Training
from tonnage.units import MIB
from tonnage.virtual import virtual_gpu


def peaks(technique: str) -> dict[str, Any]:
    """Bytes by setting."""
    return _all_peaks()[technique]


@cache
def _all_peaks() -> dict[str, dict[str, Any]]:
    """Of every technique, from one process that runs this file."""
    command = [sys.executable, "-m", "fit.virtual_peaks"]
    tests = Path(__file__).parents[1]
    process = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tests)
    assert process.returncode == 0, process.stderr
    return dict(json.loads(process.stdout.splitlines()[-1]))


def main() -> None:
    print(json.dumps({technique: measure() for technique, measure in _MEASUREMENTS.items()}))


def _training(model: nn.Module, optimizer: torch.optim.Optimizer, sample: Tensor) -> Training:
    return Training(
        model=model,
        optimizer=optimizer,
        loss=lambda model, x: model(x).sum(),
        sample=sample,
        device=torch.device("cuda"),
        stepper=Stepper(optimizer),
    )


class _Stack(nn.Module):
    """Twelve blocks of a linear and a GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width, bias=False), nn.GELU()) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _stack_step(*techniques: Technique, width: int = 64, rows: int = 8192) -> int:
    """The peak of the second step. Blocks have 16 KiB of weights unless told, and keep twice 2 MiB."""
    with virtual_gpu("h200"):
        model = _Stack(width).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        training = _training(model, optimizer, torch.ones(rows, width, device="cuda"))
        undos = [technique.apply(training) for technique in techniques]
        take_step(training, 0)
        torch.cuda.reset_peak_memory_stats()
        take_step(training, 1)
        peak_bytes = torch.cuda.max_memory_allocated()
        for undo in reversed(undos):
            undo()
        return peak_bytes


def _activation_offload() -> dict[str, int]:
    blocks = tuple(f"blocks.{index}" for index in range(10))
    moved = ActivationOffload(blocks=blocks, window_bytes=4 * MIB)
    return {"plain": _stack_step(), "moved": _stack_step(moved)}


def _weight_streaming() -> dict[str, int]:
    """The step inside backward, so that there are no gradients to speak of; one row, so that there are no activations."""
    width = 1024
    streaming = WeightStreaming(blocks=tuple(f"blocks.{index}" for index in range(12)))
    return {
        "block": width * width * 4,
        "plain": _stack_step(StepInBackward(), width=width, rows=1),
        "streamed": _stack_step(streaming, StepInBackward(), width=width, rows=1),
    }


def _sixteen_layers() -> Training:
    """Layers of 4 MiB: all gradients take 64 MiB, and all states 128."""
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16))).cuda()
    return _training(model, torch.optim.AdamW(model.parameters(), fused=True), torch.randn(8, 1024, device="cuda"))


def _held_and_taken(training: Training) -> tuple[int, int]:
    """What is there before a step, and what the step takes besides at its peak."""
    held_bytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    take_step(training, 0)
    return held_bytes, torch.cuda.max_memory_allocated() - held_bytes


def _step_in_backward() -> dict[str, int]:
    with virtual_gpu("h200"):
        training = _sixteen_layers()
        take_step(training, 0)
        _, plain_bytes = _held_and_taken(training)
        StepInBackward().apply(training)
        _, fitted_bytes = _held_and_taken(training)
        return {"plain": plain_bytes, "fitted": fitted_bytes}


def _host_states() -> dict[str, tuple[int, int]]:
    found = {}
    with virtual_gpu("h200"):
        training = _sixteen_layers()
        take_step(training, 0)
        found["plain"] = _held_and_taken(training)
        for way in ("device", "host"):
            undo = HostStates(how=way, piece_bytes=4 * MIB, window_bytes=8 * MIB).apply(training)
            take_step(training, 0)
            found[way] = _held_and_taken(training)
            undo()
    return found


def _chunked_loss() -> dict[str, int]:
    """Forward and backward of a head alone, whose logits take 512 MiB in BF16."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch["x"]).float(), batch["y"])

    def taken_bytes() -> int:
        held_bytes = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss(training.model, training.sample).backward()
        peak_bytes = torch.cuda.max_memory_allocated()
        training.model.zero_grad()
        return peak_bytes - held_bytes

    with virtual_gpu("h200"):
        model = nn.Sequential(nn.Linear(256, 32768, bias=False)).to("cuda", torch.bfloat16)
        x = torch.ones(8192, 256, device="cuda", dtype=torch.bfloat16)
        training = _training(model, torch.optim.SGD(model.parameters()), x)
        training.sample = {"x": x, "y": torch.zeros(8192, device="cuda", dtype=torch.int64)}
        training.loss = loss
        plain_bytes = taken_bytes()
        ChunkedLoss(chunk_bytes=64 * MIB).apply(training)
        return {"plain": plain_bytes, "chunked": taken_bytes()}


def _fp8() -> dict[str, list[str]]:
    """No bytes: the types of the parameters once a step was taken."""
    with virtual_gpu("h200"):
        training = build_training(CASES["llama"], dtype=torch.bfloat16)
        training.device = torch.device("cuda")
        training.model.cuda()
        training.sample = {name: tensor.cuda() for name, tensor in training.sample.items()}
        undo = Fp8Linear(minimum_width=32).apply(training)
        take_step(training, 0)
        types = {str(parameter.dtype) for parameter in training.model.parameters()}
        undo()
        return {"types": sorted(types)}


_MEASUREMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "activation-offload": _activation_offload,
    "weight-streaming": _weight_streaming,
    "step-in-backward": _step_in_backward,
    "host-states": _host_states,
    "chunked-loss": _chunked_loss,
    "fp8-linear": _fp8,
    "recompute": virtual_recompute.peaks,
}

if __name__ == "__main__":
    main()
