from copy import deepcopy
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fit.cases import Case, build_training, take_step
from tonnage.fit.stepping.parameter_step import PlainStep, parameter_steps
from tonnage.fit.stepping.stepper import Stepper
from tonnage.fit.technique import NotApplicable, Technique
from tonnage.fit.techniques.eight_bit_states import CODES, SIGNED, UNSIGNED, Code, EightBitStates, EightBitStep
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


@cache
def plain_losses() -> list[Tensor]:
    training = build()
    return [take_step(training, step) for step in range(60)]


@pytest.mark.parametrize("partners", PARTNERS.values(), ids=PARTNERS)
def test_learns_as_fast_as_plain_states(partners: list[Technique]) -> None:
    fitted = build()
    undos = [t.apply(fitted) for t in sorted([EightBitStates(), *partners], key=lambda t: t.order)]
    first, *_, expected = plain_losses()
    *_, found = [take_step(fitted, step) for step in range(60)]
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


BLOCK = 64
finite = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)


def levels(code: Code) -> Tensor:
    return code.level(torch.arange(code.largest + 1).float())


@pytest.mark.parametrize("code", [SIGNED, UNSIGNED])
@given(values=st.lists(finite, min_size=1, max_size=3 * BLOCK), seed=st.integers(0, 9), nearest=st.booleans())
@settings(max_examples=60)
def test_a_value_goes_to_a_level_beside_it(code: Code, values: list[float], seed: int, nearest: bool) -> None:
    given_values = torch.tensor(values)
    given_values = given_values if code.signed else given_values.abs()
    noise = None if nearest else torch.rand(len(values), generator=torch.Generator().manual_seed(seed))
    codes, scales = code.quantise(given_values, BLOCK, noise)
    found = code.dequantise(codes, scales, BLOCK)
    assert codes.dtype == code.dtype
    for place, (value, back) in enumerate(zip(given_values.tolist(), found.tolist(), strict=True)):
        scale = scales[place // BLOCK].item()
        beside = scale * levels(code)
        position = int(torch.searchsorted(beside, abs(value)))
        allowed = beside[max(0, position - 2) : position + 2]
        assert any(abs(abs(back) - level) <= 1e-5 * scale for level in allowed.tolist())
        assert back * value >= 0


@pytest.mark.parametrize("code", [SIGNED, UNSIGNED])
def test_what_was_narrowed_once_stays_as_it_is(code: Code) -> None:
    torch.manual_seed(0)
    values = torch.randn(1000).abs() if not code.signed else torch.randn(1000)
    codes, scales = code.quantise(values, BLOCK)
    again, scales_again = code.quantise(code.dequantise(codes, scales, BLOCK), BLOCK)
    assert torch.equal(again, codes)
    assert torch.equal(scales_again, scales)


@pytest.mark.parametrize("code", [SIGNED, UNSIGNED])
def test_rounding_at_random_is_right_in_the_mean(code: Code) -> None:
    torch.manual_seed(0)
    values = torch.rand(256) ** 2 if not code.signed else torch.randn(256)
    draws = 4000
    repeated = values.repeat(draws)
    codes, scales = code.quantise(repeated, 256, torch.rand(len(repeated)))
    mean = code.dequantise(codes, scales, 256).view(draws, 256).mean(0)
    spacing = (levels(code)[1:] - levels(code)[:-1]).max() * values.abs().max()
    within = 5 * spacing / 2 / draws**0.5  # five standard errors of a coin between two neighbours
    above_the_lowest = values.abs() > values.abs().max() * levels(code)[0]
    assert ((mean - values).abs() <= within)[above_the_lowest].all()


def test_the_root_of_a_second_moment_is_within_three_percent_down_to_a_fiftieth() -> None:
    roots = torch.linspace(0.02, 1, 4096)
    codes, scales = UNSIGNED.quantise(roots**2, 4096)
    found = UNSIGNED.dequantise(codes, scales, 4096).sqrt()
    assert ((found - roots) / roots).abs().max() < 0.03


def test_a_second_moment_never_becomes_zero_beside_a_larger_one() -> None:
    values = torch.tensor([1.0, 1e-30, 1e-12, 0.0])
    codes, scales = UNSIGNED.quantise(values, 4, torch.rand(4))
    assert (UNSIGNED.dequantise(codes, scales, 4) > 0).all()


def test_blocks_of_zeros_and_of_no_numbers() -> None:
    values = torch.tensor([0.0, 0.0, float("nan"), 1.0])
    codes, scales = SIGNED.quantise(values, 2)
    found = SIGNED.dequantise(codes, scales, 2)
    assert found[:2].tolist() == [0.0, 0.0]
    assert found[2:].isnan().all()


def test_a_second_moment_falls_though_each_step_is_less_than_a_spacing() -> None:
    """A thousandth a step; rounded to nearest it would never move."""
    parameter = torch.nn.Parameter(torch.zeros(8192))
    optimizer = torch.optim.AdamW([parameter], lr=0.0)
    steps = parameter_steps(optimizer)
    steps.replace(EightBitStep(steps.function, 256))
    torch.manual_seed(0)
    steps.step(parameter, torch.randn(8192))
    before = optimizer.state_dict()["state"][0]["exp_avg_sq"].sum()
    for _ in range(200):
        steps.step(parameter, torch.zeros(8192))
    after = optimizer.state_dict()["state"][0]["exp_avg_sq"].sum()
    torch.testing.assert_close(after / before, torch.tensor(0.999**200), rtol=0.02, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("chunk", [4096, 2**22])
def test_steps_near_the_plain_ones(dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonnage.fit.techniques.eight_bit_states._CHUNK_ELEMENTS", chunk)
    torch.manual_seed(0)
    start = torch.randn(100, 101)
    plain, coarse = (torch.nn.Parameter(start.to(kind, copy=True)) for kind in (torch.float32, dtype))
    optimizers = [torch.optim.AdamW([p], lr=0.1, weight_decay=0.0) for p in (plain, coarse)]
    steps = parameter_steps(optimizers[1])
    steps.replace(EightBitStep(PlainStep(optimizers[1]), 256))
    for _ in range(20):
        gradient = torch.randn(100, 101) + 0.5
        plain.grad = gradient
        optimizers[0].step()
        steps.step(coarse, gradient.to(dtype))
    moved, found = plain.detach() - start, coarse.detach().float() - start
    assert torch.nn.functional.cosine_similarity(moved.flatten(), found.flatten(), dim=0) > 0.99
    assert optimizers[1].state[coarse]["step"].item() == 20
    assert set(CODES) & set(optimizers[1].state[coarse]) == {"exp_avg", "exp_avg_sq"}
