"""What only a real GPU runs of the precision techniques: Triton's stochastic step, and FP8 tensor cores."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tonnage.fit.stepping import stochastic
from tonnage.fit.stepping.stochastic import has_triton, stochastic_step
from tonnage.fit.techniques.fp8 import fp8_linear

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")]

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "maximize": True}),
    "sgd": (torch.optim.SGD, {"lr": 1e-1, "weight_decay": 0.1}),
    "nesterov": (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9, "nesterov": True}),
}


def _mean_after_two_steps(start: Tensor, gradient: Tensor, group: dict[str, Any], repeats: int) -> Tensor:
    many, slopes = start.repeat(repeats, 1), gradient.repeat(repeats, 1)
    state: dict[str, Any] = {}
    for _ in range(2):
        stochastic_step(many, slopes, state, group)
    return many.double().mean(dim=0)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_kernel_is_right_in_the_mean(kind: str) -> None:
    assert has_triton()
    torch.manual_seed(0)
    start = torch.randn(1000, device="cuda", dtype=torch.bfloat16)
    gradient = torch.randn(1000, device="cuda", dtype=torch.bfloat16)
    exact = nn.Parameter(start.float())
    optimizer_class, options = OPTIMIZERS[kind]
    optimizer = optimizer_class([exact], **options)
    for _ in range(2):
        exact.grad = gradient.float()
        optimizer.step()
    repeats = 4001
    mean = _mean_after_two_steps(start, gradient, optimizer.param_groups[0], repeats)
    # Roundings of the parameter and, through the update, of its states; six of the mean's spreads at least.
    spacing = (exact.detach().abs() + gradient.float().abs() + 0.02).double() / 128
    assert ((mean - exact.detach().double()).abs() < 6 * spacing / repeats**0.5).all()


def test_the_kernel_allocates_nothing_but_the_states() -> None:
    parameter = torch.randn(1 << 24, device="cuda", dtype=torch.bfloat16)
    gradient, state = torch.randn_like(parameter), {}
    group = torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).param_groups[0]
    stochastic_step(parameter, gradient, state, group)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    stochastic_step(parameter, gradient, state, group)
    assert torch.cuda.max_memory_allocated() == before


def test_a_nan_gradient_stays_a_nan() -> None:
    parameter = torch.ones(5000, device="cuda", dtype=torch.bfloat16)
    gradient = torch.full_like(parameter, float("nan"))
    group = torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).param_groups[0]
    stochastic_step(parameter, gradient, {}, group)
    assert parameter.isnan().all()


def test_pieces_of_the_plain_path_agree_with_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    start, gradient = (torch.randn(100, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    group = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1e-2).param_groups[0]
    by_kernel = _mean_after_two_steps(start, gradient, group, repeats=20_000)
    monkeypatch.setattr(stochastic, "has_triton", lambda: False)
    by_torch = _mean_after_two_steps(start, gradient, group, repeats=20_000)
    assert torch.allclose(by_kernel, by_torch, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="this card has no FP8"
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [(4, 256), (3, 7)])
def test_fp8_products_are_near_the_plain_ones(rows: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(1024, 512, device="cuda", dtype=dtype)
    x = torch.randn(*rows, 1024, device="cuda", dtype=dtype, requires_grad=True)
    slope = torch.randn(*rows, 512, device="cuda", dtype=dtype)
    expected = torch.autograd.grad(layer(x), [x, *layer.parameters()], slope)
    y = fp8_linear(x, layer.weight, layer.bias)
    found = torch.autograd.grad(y, [x, *layer.parameters()], slope)
    for near, plain in zip((y, *found), (layer(x), *expected), strict=True):
        error = torch.linalg.vector_norm((near - plain).float()) / torch.linalg.vector_norm(plain.float())
        assert near.dtype == dtype
        assert error < 0.12
