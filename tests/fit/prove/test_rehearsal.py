"""A rehearsed step leaves a training as it was: what follows is what would have followed without it."""

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from fit.cases import build_training, dropout_net, llama
from tonnage.fit.modules import undisturbed
from tonnage.fit.prove.rehearsal import nothing_moves
from tonnage.fit.stepping.step import take_step
from tonnage.fit.stepping.stepper import Stepper
from tonnage.fit.technique import Technique
from tonnage.fit.techniques.host_states import HostStates
from tonnage.fit.techniques.master_weights import MasterWeights
from tonnage.fit.techniques.micro_batches import MicroBatches
from tonnage.fit.techniques.step_in_backward import StepInBackward
from tonnage.fit.training import Training

SETS: dict[str, list[Technique]] = {
    "plain": [],
    "in backward": [StepInBackward()],
    "states on the host": [HostStates(how="device")],
    "states stepped on the host": [HostStates(how="host", gradients="host"), MicroBatches(count=2)],
    "masters": [MasterWeights()],
    "masters on the host": [MasterWeights(), HostStates(how="device", gpu_bytes=20_000)],
}


@pytest.mark.parametrize("techniques", SETS.values(), ids=SETS)
def test_a_fresh_training_goes_on_as_if_nothing_had_been(techniques: list[Technique]) -> None:
    rehearsed, straight = (build_training(llama, dtype=torch.float32) for _ in range(2))
    for training in (rehearsed, straight):
        for technique in techniques:
            technique.apply(training)
    before = {name: tensor.clone() for name, tensor in rehearsed.model.state_dict().items()}
    with nothing_moves(rehearsed, fresh=True):
        take_step(rehearsed, rehearsed.sample)
        take_step(rehearsed, rehearsed.sample)
    assert all(torch.equal(tensor, before[name]) for name, tensor in rehearsed.model.state_dict().items())
    for _ in range(3):
        for training in (rehearsed, straight):
            take_step(training, training.sample)
    expected = straight.model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in rehearsed.model.state_dict().items())


@pytest.mark.parametrize("techniques", SETS.values(), ids=SETS)
def test_an_optimizer_that_was_stepped_before_is_not_stepped(techniques: list[Technique]) -> None:
    rehearsed, straight = (build_training(llama, dtype=torch.float32) for _ in range(2))
    for training in (rehearsed, straight):
        for technique in techniques:
            technique.apply(training)
        take_step(training, training.sample)
    with nothing_moves(rehearsed, fresh=False):
        take_step(rehearsed, rehearsed.sample)
    assert rehearsed.optimizer.param_groups[0]["lr"] == 1e-3
    for training in (rehearsed, straight):
        take_step(training, training.sample)
    for rehearsed_tensor, expected in zip(*map(values, (rehearsed, straight)), strict=True):
        assert torch.equal(rehearsed_tensor, expected)


def values(training: Training) -> list[Tensor]:
    """The parameters, and the optimizer's states by their state dict."""
    states = training.optimizer.state_dict()["state"]
    held = [value for key in sorted(states) for _, value in sorted(states[key].items()) if isinstance(value, Tensor)]
    return [*training.model.state_dict().values(), *held]


def test_random_numbers_are_drawn_as_without_it() -> None:
    training = build_training(dropout_net)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with nothing_moves(training, fresh=True):
        take_step(training, training.sample)
    assert torch.equal(torch.rand(4), expected)


def test_where_a_step_raises_the_learning_rate_and_the_loss_are_back() -> None:
    training = build_training(llama)
    loss = training.loss
    with pytest.raises(ValueError, match="midway"), nothing_moves(training, fresh=True):
        raise ValueError("midway")
    assert training.loss is loss
    assert training.optimizer.param_groups[0]["lr"] == 1e-3


class Counting(torch.optim.SGD):
    """An optimizer of somebody's own, that counts its steps and decays without gradients."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.steps = 0
        self.history: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        self.history.append(self.steps)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(0.99).add_(parameter.grad, alpha=-0.1 / self.steps)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": torch.optim.Adagrad,
    "SGD with dampening": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5),
    "one that counts": Counting,
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_any_optimizer_takes_its_first_step_as_the_first(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    rehearsed, straight = (build_training(llama) for _ in range(2))
    for training in (rehearsed, straight):
        training.optimizer = make(training.model.parameters())
        training.stepper = Stepper(training.optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(rehearsed.optimizer, 1)
    step, states = rehearsed.optimizer.step, len(rehearsed.optimizer.state)
    with nothing_moves(rehearsed, fresh=True):
        take_step(rehearsed, rehearsed.sample)
        take_step(rehearsed, rehearsed.sample)
    assert len(rehearsed.optimizer.state) == states  # Adagrad makes its own from the start
    assert rehearsed.optimizer.step is step
    assert scheduler.optimizer is rehearsed.optimizer
    for _ in range(3):
        for training in (rehearsed, straight):
            take_step(training, training.sample)
    for found, expected in zip(rehearsed.model.parameters(), straight.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_what_a_forward_pass_changes_is_as_it_was() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
            self.register_buffer("seen", torch.zeros(()))
            self.calls, self.last = 0, None
            self.generator = torch.Generator().manual_seed(3)

        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.seen + 1
            self.calls += 1
            noise = torch.rand(4, generator=self.generator) + random.random() + numpy.random.rand()
            self.last = self.layer(x) + noise
            return self.last

    model = Counter()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    states = random.getstate(), numpy.random.get_state()[1].tolist(), model.generator.get_state()
    with undisturbed(model, torch.device("cpu")):
        model(torch.ones(2, 4))
    torch.testing.assert_close(dict(model.named_buffers()), before, rtol=0, atol=0)
    assert (model.calls, model.last) == (0, None)
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == states[:2]
    assert torch.equal(model.generator.get_state(), states[2])
