"""A rehearsed step leaves a training as it was: what follows is what would have followed without it."""

import pytest
import torch

from fit.cases import build_training, dropout_net, llama
from tonnage.fit.rehearsal import nothing_moves
from tonnage.fit.stepping.step import take_step
from tonnage.fit.technique import Technique
from tonnage.fit.techniques.host_states import HostStates
from tonnage.fit.techniques.master_weights import MasterWeights
from tonnage.fit.techniques.micro_batches import MicroBatches
from tonnage.fit.techniques.step_in_backward import StepInBackward

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


def test_an_optimizer_that_was_stepped_before_is_not_stepped() -> None:
    training = build_training(llama)
    take_step(training, training.sample)
    states = {p: {k: v.clone() for k, v in state.items()} for p, state in training.optimizer.state.items()}
    with nothing_moves(training, fresh=False):
        take_step(training, training.sample)
    for parameter, state in training.optimizer.state.items():
        assert all(torch.equal(value, states[parameter][name]) for name, value in state.items())
    assert training.optimizer.param_groups[0]["lr"] == 1e-3
    take_step(training, training.sample)
    assert all(state["step"] == 2 for state in training.optimizer.state.values())


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
