"""What leaves the GPU and comes back on streams of its own: the same training, and the same peak in every step."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tonnage.fit.stepping.stepper import Stepper
from tonnage.fit.technique import Technique
from tonnage.fit.techniques.activation_offload import ActivationOffload
from tonnage.fit.techniques.host_states import HostStates
from tonnage.fit.techniques.nvme import Nvme
from tonnage.fit.techniques.recompute import Recompute
from tonnage.fit.techniques.step_in_backward import StepInBackward
from tonnage.fit.techniques.weight_streaming import WeightStreaming
from tonnage.fit.training import Training
from tonnage.units import MIB

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")]

DEPTH, WIDTH, ROWS, STEPS = 12, 1024, 4096, 6
ALL = tuple(f"blocks.{index}" for index in range(DEPTH))
FIRST = ALL[:-2]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))), 0.1)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def build() -> Training:
    torch.manual_seed(0)
    model = Stack().double().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Training(
        model=model,
        optimizer=optimizer,
        loss=lambda model, x: model(x),
        sample=torch.randn(ROWS, WIDTH, dtype=torch.float64, device="cuda"),
        device=torch.device("cuda"),
        stepper=Stepper(optimizer),
    )


def train(training: Training) -> tuple[list[float], list[int]]:
    """Losses and peaks, step by step."""
    losses, peaks = [], []
    for step in range(STEPS):
        torch.cuda.reset_peak_memory_stats()
        torch.manual_seed(step)
        training.stepper.begin(1)
        with training.forward_pass():
            loss = training.loss(training.model, training.sample)
        training.stepper.backward(loss, last=True)
        training.stepper.finish()
        losses.append(loss.item())
        del loss
        peaks.append(torch.cuda.max_memory_allocated())
    return losses, peaks


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], dict[str, Tensor], int]:
    training = build()
    losses, peaks = train(training)
    return losses, {name: tensor.cpu() for name, tensor in training.model.state_dict().items()}, peaks[-1]


RECOMPUTE = Recompute(modes=dict.fromkeys(ALL, "block"))
SETS: dict[str, Callable[[str], list[Technique]]] = {
    "activations": lambda _: [ActivationOffload(blocks=FIRST, window_bytes=64 * MIB)],
    "activations, one at a time": lambda _: [ActivationOffload(blocks=FIRST, window_bytes=0)],
    "inputs": lambda _: [RECOMPUTE, ActivationOffload(blocks=FIRST, what="inputs")],
    "weights": lambda _: [WeightStreaming(blocks=ALL)],
    "weights, recomputed": lambda _: [WeightStreaming(blocks=ALL, slots=3), RECOMPUTE, StepInBackward()],
    "weights and states": lambda _: [WeightStreaming(blocks=ALL), HostStates(how="device")],
    "weights and states, on the host": lambda _: [WeightStreaming(blocks=ALL), HostStates(how="host")],
    "everything": lambda _: [
        WeightStreaming(blocks=ALL),
        RECOMPUTE,
        ActivationOffload(blocks=FIRST, what="inputs"),
        HostStates(how="device"),
    ],
    "activations on disk": lambda directory: [Nvme(directory=directory, what="activations", blocks=FIRST)],
    "weights on disk": lambda directory: [Nvme(directory=directory, what="weights", blocks=ALL)],
    "states on disk": lambda directory: [Nvme(directory=directory, what="states")],
}


@pytest.mark.parametrize("name", SETS)
def test_training_is_the_plain_one_at_a_steady_and_lower_peak(
    name: str, plain: tuple[list[float], dict[str, Tensor], int], tmp_path: Path
) -> None:
    expected_losses, expected_parameters, plain_peak = plain
    training = build()
    undos = [technique.apply(training) for technique in SETS[name](str(tmp_path))]
    losses, peaks = train(training)
    for undo in reversed(undos):
        undo()
    assert losses == pytest.approx(expected_losses, rel=1e-10)
    for key, found in training.model.state_dict().items():
        torch.testing.assert_close(found.cpu(), expected_parameters[key], rtol=1e-8, atol=1e-10)
    assert len(set(peaks[2:])) == 1, "the peak depends on the order of calls and not on timing"
    assert peaks[-1] < plain_peak
