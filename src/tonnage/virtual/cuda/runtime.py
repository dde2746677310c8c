"""Libraries that PyTorch reaches through `torch._C`: the CUDA runtime, NVTX, cuDNN, cuSPARSELt. Nothing runs in them."""

import ctypes
from enum import IntEnum
from types import ModuleType
from typing import Any

import torch

from tonnage.virtual.cuda.cards import Cards
from tonnage.virtual.cuda.patches import Patches
from tonnage.virtual.cuda.releases import Release, release_of

_NO_PROFILER = -2  # what NVTX answers where nothing listens


class cudaError(IntEnum):
    """The one status that there is."""

    success = 0


def install(cards: Cards, patches: Patches) -> None:
    """Supply the modules, also where PyTorch looked for them at import."""
    release = release_of(cards.at(0).torch_version)
    cudart, nvtx = _cudart(cards), _nvtx()
    patches.set_all(torch._C, {"_cudart": cudart, "_nvtx": nvtx})
    patches.set(torch.cuda, "_cudart", cudart)
    patches.set(torch.cuda.nvtx, "_nvtx", nvtx)
    _install_cudnn(release, patches)


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


def _install_cudnn(release: Release, patches: Patches) -> None:
    """`torch.backends.cudnn` is wrapped, so its module's own names are reached through one of its functions."""
    cudnn = _module(
        "_cudnn",
        is_cuda=True,
        getVersionInt=lambda: release.cudnn_number,
        getRuntimeVersion=lambda: release.cudnn,
        getCompileVersion=lambda: release.cudnn,
        RNNMode=IntEnum("RNNMode", {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}),
    )
    limit = 10
    empties = False

    def set_limit(value: int) -> None:
        nonlocal limit
        limit = value

    def set_empties(value: bool) -> None:
        nonlocal empties
        empties = value

    patches.set_all(
        torch._C,
        {
            "_cudnn": cudnn,
            "_cuda_get_cudnn_benchmark_limit": lambda: limit,
            "_cuda_set_cudnn_benchmark_limit": set_limit,
            "_cuda_get_conv_benchmark_empty_cache": lambda: empties,
            "_cudnn_set_conv_benchmark_empty_cache": set_empties,
        },
    )
    for names, number in ((torch.backends.cudnn.version.__globals__, "__cudnn_version"), (_cusparselt(), "__cusparselt_version")):
        patches.set_item(names, "_init", lambda: True)
        patches.set_item(names, number, release.cudnn_number if "cudnn" in number else release.cusparselt)
    patches.set_item(torch.backends.cudnn.version.__globals__, "_cudnn", cudnn)


def _cusparselt() -> dict[str, Any]:
    return torch.backends.cusparselt.version.__globals__
