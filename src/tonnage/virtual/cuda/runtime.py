"""Libraries that PyTorch uses through `torch._C`: the CUDA runtime, NVTX and the profiler, cuDNN, cuSPARSELt.

None of them does any work.
"""

import ctypes
from enum import IntEnum
from functools import partial
from types import ModuleType
from typing import Any

import torch

from tonnage.virtual.cuda.cards import Cards
from tonnage.virtual.cuda.patches import Patches
from tonnage.virtual.cuda.releases import TorchRelease, release_of
from tonnage.virtual.kernels.attention_choice import CUDNN, EFFICIENT, FLASH, can_use
from tonnage.virtual.kernels.norms import unfused_rms_norm

_NO_PROFILER = -2  # NVTX's result without a profiler attached


class cudaError(IntEnum):
    """CUDA's status codes; only success occurs."""

    success = 0


def install(cards: Cards, patches: Patches) -> None:
    """Supply the modules, also where PyTorch looked them up at import."""
    release = release_of(cards.at(0).torch_version)
    cudart, nvtx = _cudart(cards), _nvtx()
    patches.set_all(torch._C, {"_cudart": cudart, "_nvtx": nvtx})
    patches.set(torch.cuda, "_cudart", cudart)
    patches.set(torch.cuda.nvtx, "_nvtx", nvtx)
    _install_cudnn(release, patches)
    # Only the host is profiled: otherwise PyTorch would time each operator with CUDA events.
    activities, profiler = torch.profiler.ProfilerActivity, torch.autograd.profiler
    patches.set(profiler, "_supported_activities", lambda: {activities.CPU, activities.CUDA})
    patches.set(profiler.emit_nvtx, "__enter__", lambda self: self)
    patches.set(profiler.emit_nvtx, "__exit__", lambda self, *error: False)
    # `torch.backends.cuda.can_use_flash_attention` and similar, used by attention over jagged tensors.
    names = {"flash": FLASH, "mem_efficient": EFFICIENT, "cudnn": CUDNN}
    patches.set_all(torch._C, {f"_can_use_{name}_attention": partial(can_use, which) for name, which in names.items()})
    patches.set(torch._C, "_is_flash_attention_available", lambda: True)
    if cards.at(0).torch_version < (2, 9):
        patches.set(torch, "rms_norm", unfused_rms_norm)
    if cards.at(0).torch_version < (2, 5):
        # Before 2.5, math attention computed in the dtype of its inputs; since then in float32.
        before = torch._C._get_math_sdp_allow_fp16_bf16_reduction()
        torch._C._set_math_sdp_allow_fp16_bf16_reduction(True)
        patches.on_undo(lambda: torch._C._set_math_sdp_allow_fp16_bf16_reduction(before))


def _module(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(f"torch._C.{name}")
    module.__dict__.update(contents)
    return module


def _cudart(cards: Cards) -> ModuleType:
    def mem_get_info(index: int) -> tuple[int, int]:
        allocator = cards.at(index).allocator
        return allocator.free_bytes, allocator.capacity_bytes

    def stream_create(address: int) -> cudaError:
        ctypes.c_uint64.from_address(address).value = cards.library.tonnage_new_stream(cards.selected, 0)
        return cudaError.success

    def succeed(*_: Any) -> cudaError:
        return cudaError.success

    return _module(
        "_cudart",
        cudaError=cudaError,
        cudaGetErrorString=lambda error: "no error",
        cudaMemGetInfo=mem_get_info,
        cudaStreamCreate=stream_create,
        **dict.fromkeys(
            ("cudaProfilerStart", "cudaProfilerStop", "cudaHostRegister", "cudaHostUnregister", "cudaStreamDestroy"),
            succeed,
        ),
    )


def _nvtx() -> ModuleType:
    def push(*_: Any) -> int:
        return _NO_PROFILER

    return _module(
        "_nvtx",
        rangePushA=push,
        rangePop=push,
        rangeStartA=lambda message: 0,
        rangeEnd=lambda handle: None,
        markA=lambda message: None,
        deviceRangeStart=lambda message, stream: 0,
        deviceRangeEnd=lambda handle, stream: None,
    )


def _install_cudnn(release: TorchRelease, patches: Patches) -> None:
    cudnn = _module(
        "_cudnn",
        is_cuda=True,
        getVersionInt=lambda: release.cudnn_number,
        getRuntimeVersion=lambda: release.cudnn,
        getCompileVersion=lambda: release.cudnn,
        RNNMode=IntEnum("RNNMode", {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}),
    )
    kept = {"limit": 10, "empties": False}
    patches.set_all(
        torch._C,
        {
            "_cudnn": cudnn,
            "_cuda_get_cudnn_benchmark_limit": lambda: kept["limit"],
            "_cuda_set_cudnn_benchmark_limit": lambda value: kept.update(limit=value),
            "_cuda_get_conv_benchmark_empty_cache": lambda: kept["empties"],
            "_cudnn_set_conv_benchmark_empty_cache": lambda value: kept.update(empties=value),
        },
    )
    # PyTorch wraps these modules, so their globals are reached through one of their functions.
    names = torch.backends.cudnn.version.__globals__
    _set_version(names, "__cudnn_version", release.cudnn_number, patches)
    patches.set_item(names, "_cudnn", cudnn)
    patches.set_item(torch.backends.cudnn.rnn.get_cudnn_mode.__globals__, "_cudnn", cudnn)
    _set_version(torch.backends.cusparselt.version.__globals__, "__cusparselt_version", release.cusparselt, patches)


def _set_version(names: dict[str, Any], name: str, version: int, patches: Patches) -> None:
    patches.set_item(names, "_init", lambda: True)
    patches.set_item(names, name, version)
