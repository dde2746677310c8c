"""What one case of the operator probe is: a call, and the arguments to make for it on some device.

It knows nothing of measuring: `probe_operators.py` makes the arguments, calls and records.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
FLOATS = (F32, BF16, F16)
HALVES = (BF16, F16)


@dataclass(frozen=True)
class T:
    """A tensor to be made. `layout` and `fill` take the words that `_laid_out` and `_filled` know."""

    shape: tuple[int, ...]
    dtype: torch.dtype = F32
    layout: str = ""
    fill: str = "randn"
    grad: bool | None = None
    device: str | None = None

    def make(self, device: str) -> torch.Tensor:
        with torch.no_grad():
            tensor = _laid_out(self, self.device or device)
        wants_grad = (self.dtype.is_floating_point or self.dtype.is_complex) if self.grad is None else self.grad
        return tensor.detach().requires_grad_(wants_grad)


def t(*shape: int, **options: Any) -> T:
    return T(shape, **options)


def ints(high: int, *shape: int, **options: Any) -> T:
    return T(shape, **{"dtype": torch.int64, "fill": f"int:{high}", **options})


def mask(*shape: int, **options: Any) -> T:
    return T(shape, **{"dtype": torch.bool, "fill": "bool", **options})


@dataclass(frozen=True)
class Made:
    """Anything else that is made on the device before the call: a module, an optimizer, a list."""

    build: Callable[[str], Any]


@dataclass
class Case:
    op: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    backward: bool = True
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def elements(self) -> int:
        return sum(math.prod(spec.shape) for spec in _specs_in([self.args, self.kwargs]))

    def is_half(self) -> bool:
        return any(spec.dtype in HALVES for spec in _specs_in([self.args, self.kwargs]))

    def make(self, device: str) -> tuple[list[Any], dict[str, Any]]:
        return [made(a, device) for a in self.args], {k: made(v, device) for k, v in self.kwargs.items()}


def case(op: str, call: Callable[..., Any], *args: Any, note: str = "", backward: bool = True,
         around: Callable[[], Any] = contextlib.nullcontext, **kwargs: Any) -> Case:
    return Case(op, call, args, kwargs, note, backward, around)


def _specs_in(value: Any) -> list[T]:
    if isinstance(value, T):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [spec for part in parts for spec in _specs_in(part)]


def made(value: Any, device: str) -> Any:
    if isinstance(value, T):
        return value.make(device)
    if isinstance(value, Made):
        return value.build(device)
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(made(v, device) for v in value)
    return value


def module(build: Callable[[], torch.nn.Module], dtype: torch.dtype = F32, train: bool = True) -> Made:
    return Made(lambda device: build().to(device=device, dtype=dtype).train(train))


def apply(layer: Any, *args: Any, **kwargs: Any) -> Any:
    return layer(*args, **kwargs)


@contextlib.contextmanager
def without_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def _filled(fill: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    kind, _, number = fill.partition(":")
    if kind == "int":
        return torch.randint(0, int(number), shape, device=device).to(dtype)
    if kind == "bool":
        return torch.rand(shape, device=device) < float(number or 0.5)
    if kind == "unit":
        return torch.rand(shape, device=device).mul_(0.9).add_(0.05).to(dtype)
    if kind == "full":
        return torch.full(shape, float(number), device=device).to(dtype)
    if kind == "spd":
        root = torch.randn(shape, device=device, dtype=dtype)
        return root @ root.mH + shape[-1] * torch.eye(shape[-1], device=device, dtype=dtype)
    if kind == "pinned":
        return torch.randn(shape).to(dtype).pin_memory()
    if dtype == torch.bool:
        return torch.rand(shape, device=device) < 0.5
    if dtype.is_complex:
        return torch.randn(shape, device=device, dtype=dtype)
    if not dtype.is_floating_point:
        return torch.randint(0, 100, shape, device=device).to(dtype)
    return torch.randn(shape, device=device).to(dtype)


def _laid_out(spec: T, device: str) -> torch.Tensor:
    def filled(*shape: int) -> torch.Tensor:
        return _filled(spec.fill, shape, spec.dtype, device)

    shape, layout = spec.shape, spec.layout
    if layout == "transposed":
        return filled(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
    if layout == "heads_inside":  # (batch, heads, length, width) seen in (batch, length, heads, width)
        return filled(shape[0], shape[2], shape[1], shape[3]).transpose(1, 2)
    if layout == "channels_last":
        form = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
        return filled(*shape).contiguous(memory_format=form)
    if layout == "narrowed":
        return filled(*shape[:-1], shape[-1] + 8)[..., 3 : 3 + shape[-1]]
    if layout == "strided":
        return filled(*shape[:-1], shape[-1] * 2)[..., ::2]
    if layout == "expanded":
        return filled(1, *shape[1:]).expand(shape)
    if layout == "expanded_heads":
        return filled(shape[0], 1, *shape[2:]).expand(shape)
    assert layout == "", layout
    return filled(*shape)
