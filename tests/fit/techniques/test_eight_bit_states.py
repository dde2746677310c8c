from copy import deepcopy

import pytest
import torch
from torch import nn

from fit.cases import Case, build_training, take_step
from tonnage.fit.stepping.stepper import Stepper
from tonnage.fit.technique import NotApplicable, Technique
from tonnage.fit.techniques.eight_bit_states import EightBitStates
from tonnage.fit.techniques.host_states import HostStates
from tonnage.fit.techniques.master_weights import MasterWeights
from tonnage.fit.techniques.step_in_backward import StepInBackward
from tonnage.fit.techniques.stochastic_bf16 import StochasticBf16
from tonnage.fit.training import Training


def regression() -> Case:
    """Large enough that states are narrowed: two weights of 8192 elements, and small biases that are not."""
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    batch = {"x": torch.randn(16, 64), "y": torch.randn(16, 64)}

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        found = model(batch["x"].to(next(model.parameters()).dtype))
        return nn.functional.mse_loss(found.float(), batch["y"])

    return model, batch, loss


def build() -> Training:
    training = build_training(regression, dtype=torch.float32)
    training.optimizer.param_groups[0]["lr"] = 1e-2
    return training


PARTNERS: dict[str, list[Technique]] = {
    "alone": [],
    "in-backward": [StepInBackward()],
    "stochastic": [StochasticBf16()],
    "stochastic-in-backward": [StochasticBf16(), StepInBackward()],
    "masters": [MasterWeights()],
    "device": [HostStates(how="device", gpu_bytes=11_001, piece_bytes=9_000)],
    "host": [HostStates(how="host", gpu_bytes=11_001, piece_bytes=9_000)],
    "all": [StochasticBf16(), HostStates(how="device", piece_bytes=9_000), StepInBackward()],
}


@pytest.mark.parametrize("partners", PARTNERS.values(), ids=PARTNERS)
def test_learns_as_fast_as_plain_states(partners: list[Technique]) -> None:
    plain, fitted = build(), build()
    undos = [t.apply(fitted) for t in sorted([EightBitStates(), *partners], key=lambda t: t.order)]
    first = take_step(plain, 0)
    take_step(fitted, 0)
    for step in range(1, 60):
        expected, found = take_step(plain, step), take_step(fitted, step)
    assert expected < 0.5 * first
    assert found < 1.2 * expected
    for undo in reversed(undos):
        undo()
    assert take_step(fitted, 60) < 1.2 * expected
    assert {p.dtype for p in fitted.model.parameters()} == {torch.float32}
    assert {v.dtype for s in fitted.optimizer.state.values() for v in s.values()} == {torch.float32}


@pytest.mark.parametrize("partners", PARTNERS.values(), ids=PARTNERS)
def test_a_checkpoint_is_a_plain_one_and_loads_both_ways(partners: list[Technique]) -> None:
    plain, fitted = build(), build()
    for technique in sorted([EightBitStates(), *partners], key=lambda t: t.order):
        technique.apply(fitted)
    take_step(plain, 0)
    take_step(fitted, 0)
    expected, found = plain.optimizer.state_dict()["state"], deepcopy(fitted.optimizer.state_dict()["state"])
    for index, state in expected.items():
        assert state.keys() == found[index].keys()
        for name, value in state.items():
            assert (found[index][name].shape, found[index][name].dtype) == (value.shape, value.dtype), name
    plain.optimizer.load_state_dict(deepcopy(fitted.optimizer.state_dict()))
    fitted.optimizer.load_state_dict(deepcopy(fitted.optimizer.state_dict()))
    again = fitted.optimizer.state_dict()["state"]
    torch.testing.assert_close(again, found, rtol=1e-2, atol=1e-6)  # BF16 states are between two of our levels
    take_step(plain, 1)
    take_step(fitted, 1)


def test_states_take_a_byte_an_element() -> None:
    training = build()
    EightBitStates().apply(training)
    take_step(training, 0)
    weight, bias = training.model[0].weight, training.model[0].bias
    held = sum(v.nbytes for v in training.optimizer.state[weight].values() if v.dim())
    assert held == 2 * 8192 + 2 * 4 * 8192 // 256
    assert training.optimizer.state[bias]["exp_avg"].dtype == torch.float32


def test_momentum_of_sgd() -> None:
    plain, fitted = build(), build()
    for training in (plain, fitted):
        training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.5, momentum=0.9, nesterov=True)
        training.stepper = Stepper(training.optimizer)
    EightBitStates(block=64).apply(fitted)
    for step in range(40):
        expected, found = take_step(plain, step), take_step(fitted, step)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0)


def test_refuses_with_the_reason() -> None:
    with pytest.raises(NotApplicable, match="Blocks of 100 elements"):
        EightBitStates(block=100)
    training = build()
    training.optimizer = torch.optim.RMSprop(training.model.parameters())
    with pytest.raises(NotApplicable, match="this is RMSprop"):
        EightBitStates().apply(training)
    training.optimizer = torch.optim.SGD(training.model.parameters())
    assert EightBitStates().why_not(training) == "SGD without momentum keeps no states"
