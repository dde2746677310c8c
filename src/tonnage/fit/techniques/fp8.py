"""Run the large linear layers of the blocks in FP8: faster on GPUs that support it, without saving memory.

Parameters stay as they are. Inputs and weights are e4m3 (more precision), gradients e5m2 (more range), with one scale
per tensor from its current maximum; backward saves the FP8 copy of the input. On a GPU the products run on FP8 tensor
cores; elsewhere they are computed from the same rounded numbers.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from types import MethodType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from tonnage.fit.modules import find_blocks, replace_forward
from tonnage.fit.stepping.stochastic import has_triton
from tonnage.fit.technique import Technique
from tonnage.fit.training import Training, Undo
from tonnage.fit.virtual import on_virtual_gpu

FORWARD, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # of every dimension, for the tensor cores


@dataclass(frozen=True)
class Fp8:
    """A matrix in FP8; it represents `values` times `scale`."""

    values: Tensor
    scale: Tensor  # FP32, one element

    def transposed(self) -> "Fp8":
        """Return the transpose, contiguous. It copies bytes, since copies of FP8 dtypes have no fast kernel."""
        turned = self.values.view(torch.uint8).t().contiguous().view(self.values.dtype)
        return Fp8(turned, self.scale)


def quantise(matrix: Tensor, dtype: torch.dtype) -> Fp8:
    """Return the matrix in FP8, scaled so that its largest value is the dtype's largest."""
    # Inside a compiled block, the surrounding graph fuses it.
    can_fuse = matrix.is_cuda and not on_virtual_gpu(matrix.device) and has_triton()
    function = _fused() if not torch.compiler.is_compiling() and can_fuse else _quantise
    return Fp8(*function(matrix.detach(), dtype))


def _quantise(matrix: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    largest = torch.finfo(dtype).max
    scale = (torch.linalg.vector_norm(matrix, float("inf")).float() / largest).clamp(min=1e-30)
    return (matrix.float() / scale).clamp(-largest, largest).to(dtype), scale


@cache
def _fused() -> Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]]:
    """Return a compiled version with two passes over the matrix; eager PyTorch would make FP32 copies."""
    return torch.compile(_quantise, dynamic=True)


def multiply(left: Fp8, right_rows: Fp8, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """Return `left` times the transpose of `right_rows`; in both, the summed dimension is contiguous."""
    right = right_rows.values.t()
    if left.values.is_cuda:
        return torch._scaled_mm(
            left.values, right, scale_a=left.scale, scale_b=right_rows.scale, out_dtype=dtype, use_fast_accum=fast
        )
    with torch.autocast(left.values.device.type, enabled=False):
        product = left.values.float() @ right.float()
    return (product * (left.scale * right_rows.scale)).to(dtype)


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(values, scale, weight)
        ctx.count, ctx.input_dtype = len(rows), rows.dtype
        # Forward products may use fast accumulation; gradients use the accurate one.
        return multiply(Fp8(values, scale), quantise(weight, FORWARD), dtype, fast=True)[: len(rows)]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        values, scale, weight = ctx.saved_tensors
        slope = quantise(_padded(gradient), GRADIENT)
        to_rows = to_weight = None
        if ctx.needs_input_grad[0]:
            turned = quantise(weight, FORWARD).transposed()
            to_rows = multiply(slope, turned, ctx.input_dtype, fast=False)[: ctx.count]
        if ctx.needs_input_grad[1]:
            to_weight = multiply(slope.transposed(), Fp8(values, scale).transposed(), weight.dtype, fast=False)
        return to_rows, to_weight, None, None, None


def _padded(rows: Tensor) -> Tensor:
    """Pad with zero rows to a multiple of 16, since the weight's gradient sums over rows."""
    missing = -len(rows) % MULTIPLE
    return pad(rows, (0, 0, 0, missing)) if missing else rows.contiguous()


class InputCopies:
    """Caches the FP8 copy of the last input, which query, key and value share, as do gate and up."""

    def __init__(self) -> None:
        self._of: ref[Tensor] | None = None
        self._version = 0
        self._copy: Fp8 | None = None

    def copy(self, x: Tensor) -> Fp8:
        if torch.compiler.is_compiling():  # the compiler eliminates common subexpressions itself
            return quantise(_padded(x.reshape(-1, x.shape[-1])), FORWARD)
        changed = self._version != x._version
        if changed or self._copy is None or self._of is None or self._of() is not x:
            self._copy = quantise(_padded(x.reshape(-1, x.shape[-1])), FORWARD)
            self._of, self._version = ref(x, self._drop), x._version
        return self._copy

    def _drop(self, dead: "ref[Tensor]") -> None:
        if dead is self._of:
            self._of = self._copy = None


_copies = InputCopies()


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `torch.nn.functional.linear` in FP8."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    copy = _copies.copy(x)
    rows = x.reshape(-1, x.shape[-1])
    y: Tensor = _Fp8Product.apply(rows, weight, copy.values, copy.scale, dtype)
    y = y.view(*x.shape[:-1], len(weight))
    return y if bias is None else y + bias.to(dtype)


class Fp8Linear(Technique, name="fp8"):
    minimum_width: int = 1024  # of both sides of a layer: below it, quantization costs more than the product saves

    def why_not(self, training: Training) -> str | None:
        device = training.device
        if device.type != "cuda":
            return f"the model is on the {device.type.upper()}, and FP8 products need a GPU with FP8 tensor cores"
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 9):  # Ada; Hopper and Blackwell came after it
            name, has = torch.cuda.get_device_name(device), ".".join(map(str, capability))
            return f"{name} has no FP8 tensor cores (compute capability {has}; they came with 8.9)"
        if not self._layers(training.model):
            return (
                f"no linear layer of its blocks is {self.minimum_width} wide on both sides with both widths "
                f"multiples of {MULTIPLE}"
            )
        return None

    def place(self, training: Training, stack: ExitStack) -> None:
        for layer in self._layers(training.model):
            stack.callback(run_in_fp8(layer))

    def _layers(self, model: nn.Module) -> list[nn.Linear]:
        modules = dict.fromkeys(child for block in find_blocks(model).values() for child in block.modules())
        linears = {m: (m.in_features, m.out_features) for m in modules if type(m) is nn.Linear}
        wide = {linear: widths for linear, widths in linears.items() if min(widths) >= self.minimum_width}
        return [linear for linear, widths in wide.items() if not any(width % MULTIPLE for width in widths)]


def run_in_fp8(layer: nn.Linear) -> Undo:
    """Make one layer compute in FP8. An earlier replacement of its forward is bypassed meanwhile."""
    # A method, not a closure: layers share one function, so the compiler need not recompile for each.
    return replace_forward(layer, MethodType(_forward, layer))


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return fp8_linear(x, layer.weight, layer.bias)


_forward.__name__ = "forward"  # so that a pickled module gets its plain forward back
