"""Error messages for functions of `torch._C` that the virtual GPU does not support."""

from collections.abc import Callable
from typing import Any

import torch

from tonnage.errors import TonnageError
from tonnage.virtual.cuda.cards import Cards
from tonnage.virtual.cuda.patches import Patches

_WORDS = {
    "_cuda_customAllocator": "an allocator of its own (CUDAPluggableAllocator): only PyTorch's caching allocator is",
    "_cuda_changeCurrentAllocator": "a change of allocator: only PyTorch's caching allocator is",
    "_cuda_jiterator_compile_and_launch_kernel": "a kernel compiled at run time (jiterator)",
    "_cuda_getCheckpointState": "the checkpoint of a memory pool (CUDA graph trees)",
    "_cuda_setCheckpointPoolState": "the checkpoint of a memory pool (CUDA graph trees)",
    "_cuda_setCublasWorkspaceSize": "a change of cuBLAS's workspace in a run (CUBLAS_WORKSPACE_CONFIG sets it)",
    "_cuda_setCublasLtWorkspaceSize": "a change of cuBLASLt's workspace in a run (CUBLASLT_WORKSPACE_SIZE sets it)",
    "_nccl_unique_id": "NCCL",
    "_nccl_init_rank": "NCCL",
    "_nccl_all_reduce": "NCCL",
    "_nccl_reduce": "NCCL",
    "_nccl_broadcast": "NCCL",
    "_nccl_all_gather": "NCCL",
    "_nccl_reduce_scatter": "NCCL",
}


class UnmodelledCall(TonnageError, RuntimeError):
    """Raised when a script uses something that the virtual GPU does not model."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"The virtual GPU does not model {what}.",
            hint="Leave this part out of the virtual run, or record a real one.",
        )


def refusal(what: str) -> Callable[..., Any]:
    """Return a function that raises NotModelled."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise UnmodelledCall(what)

    return refuse


def install(cards: Cards, patches: Patches) -> None:
    """Make each unsupported function raise a clear error."""
    patches.set_all(torch._C, {name: refusal(what) for name, what in _WORDS.items()})
