"""How a kernel is written: the host code of a CUDA operator, without the launch.

    @kernel("embedding_dense_backward")
    def embedding_dense_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq):
        sorted_indices = torch.empty_like(indices)      # a temporary, freed when the function returns
        return torch.zeros((num_weights, grad.shape[-1]), dtype=grad.dtype, device=grad.device)

    @after_outputs("unfold_backward")                     # what is needed beside the outputs, which are allocated before
    def unfold_backward(result, grad_in, input_sizes, dim, size, step):
        return [torch.empty(input_sizes[dim], dtype=torch.int64, device=grad_in.device)]

A kernel allocates and frees tensors in the order of the real host code; nothing is computed. `plain("name.overload")`
calls the operator's shape rule, which allocates the outputs. Arguments arrive as in the schema; those equal to the
schema's defaults may be missing, so a kernel repeats the defaults of those that it reads.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

# aten name with overload -> kernel
KERNELS: dict[str, Callable[..., Any]] = {}
# the same for sparse tensors
SPARSE_KERNELS: dict[str, Callable[..., Any]] = {}
# our own operators, by name: what PyTorch's C++ requests from CUDA through function tables
SCHEMAS: dict[str, str] = {}
COMPOSITES: dict[str, Callable[..., Any]] = {}

# Whether a tensor has no gaps and overlaps, whatever the order of its dimensions.
is_dense = torch.ops.aten.is_non_overlapping_and_dense

_PLAIN = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse3)


def kernel(*names: str, sparse: bool = False) -> Callable[[Kernel], Kernel]:
    """Register the function for these aten operators ("name" or "name.overload") on CUDA tensors, dense or sparse."""
    kernels = SPARSE_KERNELS if sparse else KERNELS

    def register(function: Kernel) -> Kernel:
        for name in names:
            assert name not in kernels, f"two kernels for {name}"
            kernels[name] = function
        return function

    return register


def after_outputs(*names: str) -> Callable[[Kernel], Kernel]:
    """Register what these operators do once the shape rule has allocated their outputs: it gets result and arguments.

    The temporaries that it returns are freed, those allocated last first.
    """

    def run(function: Callable[..., Any], by_shape: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any:
        result = by_shape(*arguments, **keywords)
        free_reversed(function(result, *arguments, **keywords))
        return result

    def register(function: Kernel) -> Kernel:
        for name in names:
            kernel(name)(partial(run, function, plain(name)))
        return function

    return register


def free_reversed(held: list[Any] | None) -> None:
    """Free temporaries as C++ does: those allocated last come first."""
    while held:
        held.pop()


def own_operator(schema: str, *, composite: bool = False) -> Callable[[Kernel], Kernel]:
    """Register the function as an operator of the namespace `tonnage`; autograd differentiates through a composite one."""

    def register(function: Kernel) -> Kernel:
        name = schema.split("(", 1)[0]
        SCHEMAS[name] = schema
        (COMPOSITES if composite else KERNELS)[name if composite else f"tonnage::{name}"] = function
        return function

    return register


@cache
def plain(name: str) -> Callable[..., Any]:
    """Return a function that applies only the operator's shape rule: it allocates the outputs and nothing else."""
    return partial(operator_named(name).redispatch, _PLAIN)


def operator_named(name: str) -> Any:
    """Return the operator of a name like "add.Tensor"."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def scratch(size_bytes: int, like: Tensor) -> Tensor | None:
    """Allocate temporary bytes from the caching allocator; hold the result for as long as the kernel would."""
    return torch.empty(size_bytes, dtype=torch.uint8, device=like.device) if size_bytes > 0 else None


def contiguous(tensor: Tensor) -> Tensor:
    """Allocate a contiguous copy, without values; return the tensor itself if it is contiguous."""
    return tensor if tensor.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def strides_of(shape: Sequence[int], order: Iterable[int]) -> list[int]:
    """Return the strides of a dense tensor whose dimensions are nested in this order, the fastest first."""
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim], step = step, step * shape[dim]
    return strides


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which CUDA sums: float32 for half precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
