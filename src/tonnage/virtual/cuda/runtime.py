"""Libraries that PyTorch uses through `torch._C` (the CUDA runtime, NVTX and the profiler, cuDNN, cuSPARSELt), and
pynvml, if it is installed.

None of them does any work. For NVML the memory in use is this process's, and sensors report an idle card.
"""

import ctypes
import os
from enum import IntEnum
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tonnage.virtual.cuda.cards import Cards, constants
from tonnage.virtual.cuda.patches import Patches
from tonnage.virtual.cuda.releases import release_of
from tonnage.virtual.kernels.attention_choice import CUDNN, EFFICIENT, FLASH, can_use
from tonnage.virtual.kernels.norms import unfused_rms_norm

cudaError = IntEnum("cudaError", {"success": 0})  # CUDA's status codes; only success occurs


def install(cards: Cards, patches: Patches) -> None:
    """Supply the modules, also where PyTorch looked them up at import."""
    cudart, nvtx = _cudart(cards), _module("_nvtx", **constants("torch._C._nvtx"))
    patches.set_all(torch._C, {"_cudart": cudart, "_nvtx": nvtx})
    patches.set(torch.cuda, "_cudart", cudart)
    patches.set(torch.cuda.nvtx, "_nvtx", nvtx)
    _install_cudnn(cards.at(0).torch_version, patches)
    # Only the host is profiled: otherwise PyTorch would time each operator with CUDA events.
    activities, profiler = torch.profiler.ProfilerActivity, torch.autograd.profiler
    patches.set(profiler, "_supported_activities", lambda: {activities.CPU, activities.CUDA})
    patches.set(profiler.emit_nvtx, "__enter__", lambda self: self)
    patches.set(profiler.emit_nvtx, "__exit__", lambda self, *error: False)
    # `torch.backends.cuda.can_use_flash_attention` and similar, used by attention over jagged tensors.
    names = {"flash": FLASH, "mem_efficient": EFFICIENT, "cudnn": CUDNN}
    patches.set_all(torch._C, {f"_can_use_{name}_attention": partial(can_use, which) for name, which in names.items()})
    if cards.at(0).torch_version < (2, 9):
        patches.set(torch, "rms_norm", unfused_rms_norm)
    if cards.at(0).torch_version < (2, 5):
        # Before 2.5, math attention computed in the dtype of its inputs; since then in float32.
        before = torch._C._get_math_sdp_allow_fp16_bf16_reduction()
        torch._C._set_math_sdp_allow_fp16_bf16_reduction(True)
        patches.on_undo(lambda: torch._C._set_math_sdp_allow_fp16_bf16_reduction(before))
    _install_nvml(cards, patches)


def _module(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(f"torch._C.{name}")
    module.__dict__.update(contents)
    return module


def _cudart(cards: Cards) -> ModuleType:
    def stream_create(address: int) -> cudaError:
        ctypes.c_uint64.from_address(address).value = cards.library.tonnage_new_stream(cards.selected, 0)
        return cudaError.success

    quiet = ("cudaProfilerStart", "cudaProfilerStop", "cudaHostRegister", "cudaHostUnregister", "cudaStreamDestroy")
    return _module(
        "_cudart",
        cudaError=cudaError,
        cudaMemGetInfo=cards.memory_info,
        cudaStreamCreate=stream_create,
        **dict.fromkeys(quiet, lambda *_: cudaError.success),
        **constants("torch._C._cudart"),
    )


def _install_cudnn(torch_version: tuple[int, int], patches: Patches) -> None:
    release = release_of(torch_version)
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
    backends = torch.backends
    for names, name, value in (
        (backends.cudnn.version.__globals__, "_init", lambda: True),
        (backends.cudnn.version.__globals__, "__cudnn_version", release.cudnn_number),
        (backends.cudnn.version.__globals__, "_cudnn", cudnn),
        (backends.cudnn.rnn.get_cudnn_mode.__globals__, "_cudnn", cudnn),
        (backends.cusparselt.version.__globals__, "_init", lambda: True),
        (backends.cusparselt.version.__globals__, "__cusparselt_version", release.cusparselt),
    ):
        patches.set_item(names, name, value)


def _install_nvml(cards: Cards, patches: Patches) -> None:
    """Replace pynvml's functions; a handle is a card's index."""
    try:
        import pynvml
    except ImportError:
        return

    def handle(index: Any) -> int:
        cards.check(int(index))
        return int(index)

    def memory(index: int, version: Any = None) -> SimpleNamespace:
        free, total = cards.memory_info(index)
        return SimpleNamespace(total=total, used=total - free, free=free, reserved=0, version=version)

    functions = {
        **constants("pynvml"),
        "nvmlDeviceGetCount": lambda: len(cards),
        "nvmlDeviceGetHandleByIndex": handle,
        "nvmlDeviceGetIndex": handle,
        "nvmlDeviceGetName": lambda index: cards.at(index).gpu.name,
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetComputeRunningProcesses": lambda index: [
            SimpleNamespace(pid=os.getpid(), usedGpuMemory=memory(index).used)
        ],
        "nvmlDeviceGetUtilizationRates": lambda index: SimpleNamespace(gpu=0, memory=0),
        "nvmlDeviceGetPowerUsage": lambda index: cards.at(index).gpu.power_w * 1000,
        "nvmlDeviceGetEnforcedPowerLimit": lambda index: cards.at(index).gpu.power_w * 1000,
        "nvmlDeviceGetClockInfo": lambda index, kind=0: cards.at(index).gpu.clock_mhz,
        "nvmlDeviceGetCudaComputeCapability": lambda index: cards.at(index).gpu.compute_capability,
    }
    patches.set_all(pynvml, {name: function for name, function in functions.items() if hasattr(pynvml, name)})
