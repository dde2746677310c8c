"""How a kernel is written: the host code of a CUDA operator, without the launch.

    @kernel("embedding_dense_backward")
    def embedding_dense_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq):
        sorted_indices = torch.empty_like(indices)      # a temporary, freed when the function returns
        return torch.zeros((num_weights, grad.shape[-1]), dtype=grad.dtype, device=grad.device)

A kernel allocates and frees tensors in the order of the real host code; nothing is computed. `plain("name.overload")`
calls the operator's shape rule, for kernels that only add temporaries. Arguments arrive as in the schema; those equal
to the schema's defaults may be missing, so a kernel repeats the defaults of those that it reads.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

# aten name with overload -> kernel
KERNELS: dict[str, Callable[..., Any]] = {}
# the same for sparse tensors
SPARSE_KERNELS: dict[str, Callable[..., Any]] = {}
# our own operators, by name: what PyTorch's C++ requests from CUDA through function tables
SCHEMAS: dict[str, str] = {}
COMPOSITES: dict[str, Callable[..., Any]] = {}

_PLAIN = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse3)


def kernel(*names: str) -> Callable[[Kernel], Kernel]:
    """Register the function for these aten operators ("name" or "name.overload") on the CUDA key."""

    def register(function: Kernel) -> Kernel:
        for name in names:
            assert name not in KERNELS, f"two kernels for {name}"
            KERNELS[name] = function
        return function

    return register


def sparse_kernel(*names: str) -> Callable[[Kernel], Kernel]:
    """Register the function for these aten operators on sparse (COO) tensors."""

    def register(function: Kernel) -> Kernel:
        SPARSE_KERNELS.update(dict.fromkeys(names, function))
        return function

    return register


def own_operator(schema: str, *, composite: bool = False) -> Callable[[Kernel], Kernel]:
    """Register the function as an operator of the namespace `tonnage`; autograd differentiates through a composite one."""

    def register(function: Kernel) -> Kernel:
        name = schema.split("(", 1)[0]
        SCHEMAS[name] = schema
        if composite:
            COMPOSITES[name] = function
        else:
            KERNELS[f"tonnage::{name}"] = function
        return function

    return register


def plain(operator: Any) -> Callable[..., Any]:
    """Return a function that applies only the operator's shape rule: it allocates the outputs and nothing else."""
    if isinstance(operator, str):
        packet, _, overload = operator.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def call(*arguments: Any, **keywords: Any) -> Any:
        return operator.redispatch(_PLAIN, *arguments, **keywords)

    return call


def scratch(size_bytes: int, like: torch.Tensor) -> torch.Tensor | None:
    """Allocate temporary bytes from the caching allocator; hold the result for as long as the kernel would."""
    return torch.empty(size_bytes, dtype=torch.uint8, device=like.device) if size_bytes > 0 else None
