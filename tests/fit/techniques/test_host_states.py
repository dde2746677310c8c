import gc
import weakref
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fit.cases import CASES, Case, assert_same_parameters, assert_same_training, build_training, take_step
from fit.virtual_peaks import peaks
from tonnage.fit.stepping import host_step, parameter_step
from tonnage.fit.stepping.host_step import pieces_of
from tonnage.fit.stepping.parameter_step import parameter_steps
from tonnage.fit.stepping.stepper import Stepper
from tonnage.fit.technique import NotApplicable, Technique
from tonnage.fit.techniques import host_states
from tonnage.fit.techniques.host_states import HostStates
from tonnage.fit.techniques.step_in_backward import StepInBackward
from tonnage.fit.training import Training

DEVICE = HostStates(how="device", gpu_bytes=100_003, piece_bytes=8192)
HOST = HostStates(how="host", gpu_bytes=100_003, piece_bytes=8192)
HOST_GRADIENTS = HostStates(how="host", gradients="host", piece_bytes=8192)
WAYS = {"device": DEVICE, "host": HOST, "host-gradients": HOST_GRADIENTS}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the parameters of small models are cut several times."""
    monkeypatch.setattr(host_step, "LEAST_ELEMENTS", 16)


def take_accumulated_step(training: Training, seed: int, parts: int = 3) -> Tensor:
    torch.manual_seed(seed)
    training.stepper.begin(parts)
    losses = []
    for part in range(parts):
        loss = training.loss(training.model, training.sample) / parts
        training.stepper.backward(loss, last=part == parts - 1)
        losses.append(loss.detach())
    training.stepper.finish()
    return torch.stack(losses)


@pytest.mark.parametrize("technique", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("build", CASES.values(), ids=CASES)
def test_trains_as_states_on_the_device_do(build: Callable[[], Case], technique: Technique) -> None:
    assert_same_training(build, technique, steps=5)


@pytest.mark.parametrize("technique", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("build", CASES.values(), ids=CASES)
def test_with_small_parameters_stepped_together_it_trains_the_same(
    build: Callable[[], Case], technique: Technique, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameter_step, "_SMALL_SHARE", 4)
    assert_same_training(build, technique, steps=5)


def test_states_of_small_parameters_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameter_step, "_SMALL_SHARE", 4)
    training = build_training(CASES["gpt2"], dtype=torch.float32)
    HostStates(how="device", piece_bytes=8192).apply(training)
    take_step(training, 0)
    largest = max(parameter.numel() for parameter in training.model.parameters())
    for parameter, state in training.optimizer.state.items():
        here = all(piece.buffer is None for piece in pieces_of(state))
        assert here == (parameter.numel() * 4 < largest)


def test_the_device_s_step_is_the_plain_one_bit_by_bit() -> None:
    plain, fitted = (build_training(CASES["gpt2"], dtype=torch.float32) for _ in range(2))
    HostStates(how="device", piece_bytes=8192).apply(fitted)
    for step in range(3):
        take_step(plain, step)
        take_step(fitted, step)
    assert_same_parameters(plain.model, fitted.model, 0.0)


@pytest.mark.parametrize("technique", WAYS.values(), ids=WAYS)
def test_clips_by_the_norm_of_all_gradients(technique: Technique) -> None:
    assert_same_training(CASES["gpt2"], technique, clip_norm=0.1, steps=3)


@pytest.mark.parametrize("clip_norm", [None, 0.1])
@pytest.mark.parametrize("technique", WAYS.values(), ids=WAYS)
def test_accumulates_micro_batches(technique: Technique, clip_norm: float | None) -> None:
    plain, fitted = (build_training(CASES["dropout"], clip_norm=clip_norm) for _ in range(2))
    technique.apply(fitted)
    for step in range(4):
        expected, found = take_accumulated_step(plain, step), take_accumulated_step(fitted, step)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert_same_parameters(plain.model, fitted.model, 1e-10)


@pytest.mark.parametrize("technique", WAYS.values(), ids=WAYS)
def test_works_inside_backward_too(technique: Technique) -> None:
    assert_same_training(CASES["llama"], technique, StepInBackward(), steps=3)


@pytest.mark.parametrize("technique", WAYS.values(), ids=WAYS)
def test_a_checkpoint_is_the_plain_one_and_loads_both_ways(technique: Technique) -> None:
    plain, fitted = (build_training(CASES["gpt2"]) for _ in range(2))
    take_step(plain, 0)
    take_step(fitted, 0)
    undo = technique.apply(fitted)  # with states in place
    for step in (1, 2):
        take_step(plain, step)
        take_step(fitted, step)
    expected, found = deepcopy(plain.optimizer.state_dict()), deepcopy(fitted.optimizer.state_dict())
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    take_step(plain, 3)
    take_step(fitted, 4)  # astray, and back by loading
    plain.optimizer.load_state_dict(found)
    fitted.optimizer.load_state_dict(expected)
    fitted.model.load_state_dict(deepcopy(plain.model.state_dict()))
    for step in (5, 6):
        torch.testing.assert_close(take_step(fitted, step), take_step(plain, step), rtol=1e-10, atol=1e-10)
    undo()
    torch.testing.assert_close(fitted.optimizer.state_dict(), plain.optimizer.state_dict(), rtol=1e-10, atol=1e-10)
    take_step(plain, 7)
    take_step(fitted, 7)
    assert_same_parameters(plain.model, fitted.model, 1e-10)


def test_before_the_first_step_there_are_no_states_to_save() -> None:
    training = build_training(CASES["llama"])
    plain = training.optimizer.state_dict()
    DEVICE.apply(training)
    assert training.optimizer.state_dict() == plain


@pytest.mark.parametrize("gpu_bytes", [0, 17, 4000, 100_003, 10**9])
def test_the_device_keeps_its_share_to_the_element(gpu_bytes: int) -> None:
    training = build_training(CASES["llama"])
    HostStates(gpu_bytes=gpu_bytes, piece_bytes=8192).apply(training)
    pieces = [piece for state in training.optimizer.state.values() for piece in pieces_of(state)]
    here = sum(piece.packing.tensor_bytes for piece in pieces if piece.buffer is None)
    everything = sum(2 * 8 * parameter.numel() for parameter in training.model.parameters())
    assert here == min(everything, gpu_bytes // 16 * 16)


OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.ASGD, {}),
]


class Odd(nn.Module):
    """A single number, a permuted weight, an empty one, one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.weight = nn.Parameter(torch.randn(8, 3, 5, 7).to(memory_format=torch.channels_last))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * nn.functional.conv2d(x, self.weight).square().mean() + self.empty.sum()


def odd() -> Case:
    return Odd(), torch.randn(2, 3, 9, 9, dtype=torch.float64), lambda model, batch: model(batch)


@pytest.mark.parametrize("technique", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_any_optimizer_of_elements_and_any_shape(kind: Any, options: dict[str, Any], technique: HostStates) -> None:
    trainings = [build_training(odd) for _ in range(2)]
    for training in trainings:
        training.optimizer = kind(training.model.parameters(), lr=1e-2, **options)
        training.stepper = Stepper(training.optimizer)
    plain, fitted = trainings
    undo = HostStates(how=technique.how, gradients=technique.gradients, gpu_bytes=1000, piece_bytes=2048).apply(fitted)
    for step in range(4):
        take_step(plain, step)
        take_step(fitted, step)
    found = fitted.optimizer.state_dict()
    torch.testing.assert_close(found, plain.optimizer.state_dict(), rtol=1e-10, atol=1e-10)
    undo()
    assert_same_parameters(plain.model, fitted.model, 1e-10)
    assert found["state"][1].keys() == fitted.optimizer.state_dict()["state"][1].keys()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
        (torch.optim.AdamW, {}),
        (torch.optim.Adagrad, {}),
    ],
)
def test_the_host_steps_bf16_states_as_the_plain_loop_does(kind: Any, options: dict[str, Any]) -> None:
    """PyTorch's own fused SGD does not: its momenta of 16-bit types are wrong on the CPU."""
    torch.manual_seed(0)
    weight, gradient = (torch.randn(200, dtype=torch.bfloat16) for _ in range(2))
    moved = []
    for technique in (None, HostStates(how="host", piece_bytes=128)):
        training = build_training(
            lambda: (nn.Linear(1, 200, bias=False), gradient, lambda m, g: (m.weight[:, 0] * g).sum())
        )
        training.model.to(torch.bfloat16).weight.data[:, 0] = weight
        plain_options = {**options, "fused": None} if technique is None else options
        training.optimizer = kind(training.model.parameters(), lr=0.5, **plain_options)
        training.stepper = Stepper(training.optimizer)
        undo = technique.apply(training) if technique else None
        for step in range(3):
            take_step(training, step)
        if undo:
            undo()
        moved.append((training.model.weight[:, 0].detach() - weight).float())
    torch.testing.assert_close(moved[1], moved[0], rtol=0.05, atol=0.05)


def test_an_error_on_the_host_comes_out_of_the_step() -> None:
    training = build_training(CASES["dropout"])
    HostStates(piece_bytes=8192).apply(training)
    way = parameter_steps(training.optimizer).function
    inner = way.inner

    def broken(*arguments: Any) -> None:
        raise ArithmeticError("the host is tired")

    way.inner = broken
    with pytest.raises(ArithmeticError, match="the host is tired"):
        take_step(training, 0)
    way.inner = inner
    take_step(training, 1)  # no slot was lost


def test_a_host_without_the_memory_is_found_out_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    training = build_training(CASES["llama"])
    take_step(training, 0)
    before, stepper = deepcopy(training.optimizer.state_dict()), training.stepper
    monkeypatch.setattr(host_states, "free_host_bytes", lambda: 1000)
    with pytest.raises(NotApplicable, match=r"of optimizer states would go to the host, which has 1000 B") as caught:
        HOST.apply(training)
    assert "gpu_bytes=" in caught.value.hint
    monkeypatch.setattr(host_states, "free_host_bytes", lambda: 10**12)

    def refuse_after(byte_count: int, device: torch.device) -> Tensor:
        raise host_states.HostMemoryExhausted("could not be pinned", hint="smaller")

    monkeypatch.setattr(host_step, "pinned", refuse_after)
    with pytest.raises(NotApplicable, match="could not be pinned"):
        DEVICE.apply(training)
    assert training.stepper is stepper
    torch.testing.assert_close(training.optimizer.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("technique", WAYS.values(), ids=WAYS)
def test_an_abandoned_step_leaves_nothing_behind(technique: HostStates) -> None:
    plain, fitted = build_training(CASES["dropout"]), build_training(CASES["dropout"])
    technique.apply(fitted)
    fitted.stepper.begin(2)
    fitted.stepper.backward(fitted.loss(fitted.model, fitted.sample), last=False)
    fitted.stepper.abandon()  # as when the second micro-batch raises
    for step in range(2):
        take_accumulated_step(plain, step)
        take_accumulated_step(fitted, step)
    assert_same_parameters(plain.model, fitted.model, 1e-10)


def test_a_model_that_is_dropped_without_undo_is_freed() -> None:
    training = build_training(CASES["dropout"])
    HOST.apply(training)
    take_step(training, 0)
    weight = weakref.ref(training.model.head.weight)
    del training
    gc.collect()
    assert weight() is None


def test_refuses_with_the_reason() -> None:
    with pytest.raises(NotApplicable, match="how='nowhere'"):
        HostStates(how="nowhere")
    with pytest.raises(NotApplicable, match="stepped on the device"):
        HostStates(how="device", gradients="host")
    training = build_training(CASES["dropout"])
    training.optimizer = torch.optim.SGD(training.model.parameters())
    assert HOST.why_not(training) == "SGD without momentum keeps no states"
    training.optimizer = torch.optim.Adafactor(training.model.parameters())
    assert "whole matrix" in str(HOST.why_not(training))
    training.model.table = nn.Embedding(4, 4, sparse=True)
    assert "sparse gradients" in str(HOST.why_not(training))


def test_what_stays_on_a_virtual_gpu_is_known_to_the_mebibyte() -> None:
    found = {way: [size / 2**20 for size in sizes] for way, sizes in peaks("host-states").items()}
    (plain, plain_peak), (device, device_peak), (host, host_peak) = (found[way] for way in ("plain", "device", "host"))
    assert plain_peak == pytest.approx(64, abs=1)  # all gradients
    assert plain - device == pytest.approx(128 - 12, abs=1)  # all states, less three slots
    assert device_peak == pytest.approx(8 + 4, abs=1)  # the window and one gradient
    assert plain - host == pytest.approx(128, abs=1)
    assert host_peak <= 6 * 2 + 4 + 1  # six pieces under way, each half a gradient, and the next one
