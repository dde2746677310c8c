"""Steps inside backward, states on the host and 8-bit states on a real GPU: the numbers, and the bytes that stay."""

import pytest
import torch
from torch import nn

from tonnage.fit.stepping.parameter_step import parameter_steps
from tonnage.fit.stepping.stepper import Stepper
from tonnage.fit.technique import Technique
from tonnage.fit.techniques.eight_bit_states import CODES, EightBitStates, EightBitStep
from tonnage.fit.techniques.host_states import HostStates
from tonnage.fit.techniques.step_in_backward import StepInBackward
from tonnage.fit.techniques.stochastic_bf16 import StochasticBf16
from tonnage.fit.training import Training

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

WIDTH, DEPTH, MIB = 2048, 12, 2**20


def _training(*, dtype: torch.dtype = torch.bfloat16, clip_norm: float | None = None, depth: int = DEPTH) -> Training:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(depth)]
    model = nn.Sequential(*layers).to("cuda", dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return Training(
        model=model,
        optimizer=optimizer,
        loss=lambda model, x: (model(x) - x).float().square().mean(),
        sample=torch.randn(256, WIDTH, device="cuda", dtype=dtype),
        device=torch.device("cuda"),
        stepper=Stepper(optimizer, clip_norm=clip_norm),
    )


def _step(training: Training, parts: int = 1) -> torch.Tensor:
    training.stepper.begin(parts)
    for part in range(parts):
        loss = training.loss(training.model, training.sample) / parts
        training.stepper.backward(loss, last=part == parts - 1)
    training.stepper.finish()
    return loss.detach()


def _run(training: Training, *techniques: Technique, parts: int = 1, steps: int = 5) -> list[torch.Tensor]:
    for technique in techniques:
        technique.apply(training)
    for _ in range(steps):
        _step(training, parts)
    return [parameter.detach().clone() for parameter in training.model.parameters()]


EXACT = {
    "in-backward": StepInBackward(),
    "device": HostStates(how="device", piece_bytes=2 * MIB, window_bytes=4 * MIB),
    "split": HostStates(how="device", gpu_bytes=50_000_001, piece_bytes=2 * MIB, window_bytes=4 * MIB),
}


@pytest.mark.parametrize("technique", EXACT.values(), ids=EXACT)
def test_the_device_s_step_is_the_plain_one_bit_by_bit(technique: Technique) -> None:
    expected, found = _run(_training()), _run(_training(), technique)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("gradients", ["device", "host"])
@pytest.mark.parametrize("clip_norm", [None, 0.01])
@pytest.mark.parametrize("parts", [1, 3])
def test_the_host_s_step_is_the_plain_one(gradients: str, clip_norm: float | None, parts: int) -> None:
    technique = HostStates(how="host", gradients=gradients, gpu_bytes=10_000_001, piece_bytes=2 * MIB)
    expected = _run(_training(dtype=torch.float32, clip_norm=clip_norm), parts=parts)
    found = _run(_training(dtype=torch.float32, clip_norm=clip_norm), technique, parts=parts)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("how", ["device", "host"])
def test_what_stays_on_the_gpu_is_what_was_said(how: str) -> None:
    technique = HostStates(how=how, piece_bytes=2 * MIB, window_bytes=4 * MIB)
    plain = _training()
    _run(plain, steps=2)
    held = torch.cuda.memory_allocated()
    del plain
    training = _training()
    _run(training, technique, steps=2)
    states = 2 * sum(parameter.nbytes for parameter in training.model.parameters())
    assert torch.cuda.memory_allocated() <= held - states + technique.staging_bytes + MIB
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    _step(training)
    activations = 4 * DEPTH * training.sample.nbytes
    largest = WIDTH * WIDTH * 2
    assert torch.cuda.max_memory_allocated() - before <= technique.staging_bytes + 2 * largest + activations


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [4096, 100_003])
def test_the_kernel_of_8_bit_states_is_the_plain_arithmetic(
    optimizer_class: type[torch.optim.Optimizer], dtype: torch.dtype, count: int
) -> None:
    options = {"momentum": 0.9, "nesterov": True} if optimizer_class is torch.optim.SGD else {}
    torch.manual_seed(0)
    start, gradients = torch.randn(count), torch.randn(6, count) + 0.3
    results = []
    for device in ("cpu", "cuda"):
        parameter = nn.Parameter(start.to(device, dtype, copy=True))
        optimizer = optimizer_class([parameter], lr=0.1, weight_decay=0.01, **options)
        steps = parameter_steps(optimizer)
        steps.replace(EightBitStep(steps.function, 256))
        for gradient in gradients:
            steps.step(parameter, gradient.to(device, dtype))
        state = optimizer.state_dict()["state"][0]
        results.append(
            (parameter.detach().cpu().float(), {name: state[name].cpu().float() for name in CODES if name in state})
        )
    (parameter, state), (found, found_state) = results
    # Random roundings differ; what remains is right in the mean and near for each element.
    moved, found_moved = parameter - start, found - start
    assert torch.nn.functional.cosine_similarity(moved, found_moved, dim=0) > 0.99
    for name, expected in state.items():
        assert torch.nn.functional.cosine_similarity(expected, found_state[name], dim=0) > 0.999
        torch.testing.assert_close(found_state[name].mean(), expected.mean(), rtol=0.02, atol=1e-3)


@pytest.mark.parametrize(
    "techniques",
    [
        [EightBitStates()],
        [StochasticBf16(), EightBitStates(), StepInBackward()],
        [StochasticBf16(), EightBitStates(), HostStates(how="device", piece_bytes=2 * MIB, window_bytes=4 * MIB)],
    ],
    ids=lambda techniques: "+".join(technique.name for technique in techniques),
)
def test_8_bit_states_learn(techniques: list[Technique]) -> None:
    plain, fitted = _training(depth=2), _training(depth=2)  # a deeper one learns nothing in forty steps
    first = _step(plain)
    _run(plain, steps=40)
    _run(fitted, *techniques, steps=41)
    expected, found = _step(plain), _step(fitted)
    assert expected < first
    assert found < expected + 0.2 * (first - expected)
