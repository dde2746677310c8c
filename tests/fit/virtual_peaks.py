"""Peaks of one step on the virtual GPU, with and without a technique.

In a process of its own: autograd's engine learns how many devices there are at the first backward pass, and other tests
have had theirs on the CPU.

    python tests/fit/virtual_peaks.py
"""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path


def peaks(technique: str) -> dict[str, int]:
    """Peak bytes by setting."""
    return _all_peaks()[technique]


@cache
def _all_peaks() -> dict[str, dict[str, int]]:
    """Of every technique, from one process that runs this file."""
    process = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=240)
    assert process.returncode == 0, process.stderr
    return dict(json.loads(process.stdout))


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    print(json.dumps({technique: measure() for technique, measure in _MEASUREMENTS.items()}))


def _stack_step(*techniques: object, width: int = 64, rows: int = 8192) -> int:
    """Twelve blocks of a linear and a GELU. At first they have 16 KiB of weights and keep twice 2 MiB."""
    import torch
    from torch import nn

    from fit.cases import take_step
    from tonnage.fit.stepping.stepper import Stepper
    from tonnage.fit.training import Training
    from tonnage.virtual import virtual_gpu

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(width, width, bias=False), nn.GELU()) for _ in range(12)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    with virtual_gpu("h200"):
        model = Stack().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        training = Training(
            model=model,
            optimizer=optimizer,
            loss=lambda model, x: model(x).sum(),
            sample=torch.ones(rows, width, device="cuda"),
            device=torch.device("cuda"),
            stepper=Stepper(optimizer),
        )
        undos = [technique.apply(training) for technique in techniques]  # type: ignore[attr-defined]
        take_step(training, 0)
        torch.cuda.reset_peak_memory_stats()
        take_step(training, 1)
        peak_bytes = torch.cuda.max_memory_allocated()
        for undo in reversed(undos):
            undo()
        return peak_bytes


def _activation_offload() -> dict[str, int]:
    from tonnage.fit.techniques.activation_offload import ActivationOffload
    from tonnage.units import MIB

    blocks = tuple(f"blocks.{index}" for index in range(10))
    moved = ActivationOffload(blocks=blocks, window_bytes=4 * MIB)
    return {"plain": _stack_step(), "moved": _stack_step(moved)}


def _weight_streaming() -> dict[str, int]:
    """The step inside backward, so that there are no gradients to speak of; one row, so that there are no activations."""
    from tonnage.fit.techniques.step_in_backward import StepInBackward
    from tonnage.fit.techniques.weight_streaming import WeightStreaming

    width = 1024
    streaming = WeightStreaming(blocks=tuple(f"blocks.{index}" for index in range(12)))
    return {
        "block": width * width * 4,
        "plain": _stack_step(StepInBackward(), width=width, rows=1),
        "streamed": _stack_step(streaming, StepInBackward(), width=width, rows=1),
    }


_MEASUREMENTS: dict[str, Callable[[], dict[str, int]]] = {
    "activation-offload": _activation_offload,
    "weight-streaming": _weight_streaming,
}

if __name__ == "__main__":
    main()
