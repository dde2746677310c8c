"""Bindings that compiled code expects from a CUDA build of torch, for a build without CUDA.

Not modelled: the CUDA graph trees of `mode="reduce-overhead"`. They checkpoint the allocator's pools and free memory
under live tensors; their peak is close to that of the same code without them.
"""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tonnage.virtual.cuda.patches import Patches
from tonnage.virtual.standins import StandIns


class _AllocatorState:
    """A placeholder: torch._inductor.cudagraph_trees looks up the name when it is imported."""


def is_needed() -> bool:
    """Whether the installed torch was built without CUDA."""
    return not (Path(torch.__file__).parent / "lib" / "libtorch_cuda.so").exists()


def install(patches: Patches) -> None:
    """Supply the missing names of `torch._C`."""
    patches.set(torch._C._dynamo.guards, "_empty_strided_cuda", _empty_strided_cuda)
    patches.set(torch._C, "_cuda_CUDAAllocator_AllocatorState", _AllocatorState)


def _empty_strided_cuda(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


def run_without_graphs(compile_fx: ModuleType, stand_ins: StandIns, patches: Patches) -> None:
    """Run compiled code directly instead of capturing a CUDA graph, and report that."""

    def cudagraphify(model: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        stand_ins.unmodelled("torch.compile", "CUDA graphs left out: a CPU build of torch has no trees of them")
        return model

    patches.set(compile_fx, "cudagraphify", cudagraphify)
