"""Device count, selection and properties, initialisation, and the versions that a CUDA build reports.

A process forked after CUDA was initialised cannot use it, as on a real card. Data-loader workers are such children:
their CPU work continues, `is_available` still answers, and nothing they do reaches the parent's recording, which the
fork copied.
"""

import ctypes
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import FrozenInstanceError
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._utils import _LazySeedTracker

from tonnage.hardware import Gpu
from tonnage.units import MIB
from tonnage.virtual.cuda.cards import Cards
from tonnage.virtual.cuda.patches import Patches
from tonnage.virtual.cuda.releases import release_of

_CUDA = 1  # c10::DeviceType
_REQUIRE_INIT = "_ZN5torch5utils24set_requires_device_initEN3c1010DeviceTypeEb"
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "tonnage")


class _CUuuid:
    """A card's UUID, the same for the same GPU and index."""

    def __init__(self, value: uuid.UUID) -> None:
        self.bytes = list(value.bytes)
        self._text = str(value)

    def __str__(self) -> str:
        return self._text


class _CudaDeviceProperties:
    """What `get_device_properties` returns: a GPU of the catalogue under CUDA's names, with clock rates in kHz."""

    def __init__(self, gpu: Gpu, index: int) -> None:
        major, minor = gpu.compute_capability
        vars(self).update(
            name=gpu.name, major=major, minor=minor, is_multi_gpu_board=0, is_integrated=0,
            multi_processor_count=gpu.sm_count, total_memory=gpu.memory_bytes,
            max_threads_per_multi_processor=gpu.max_threads_per_sm, max_threads_per_block=gpu.max_threads_per_block,
            warp_size=gpu.warp_size, clock_rate=gpu.clock_mhz * 1000, memory_clock_rate=gpu.memory_clock_mhz * 1000,
            memory_bus_width=gpu.memory_bus_bits, shared_memory_per_block=gpu.shared_memory_per_block_bytes,
            shared_memory_per_block_optin=gpu.shared_memory_per_block_optin_bytes,
            shared_memory_per_multiprocessor=gpu.shared_memory_per_sm_bytes, regs_per_multiprocessor=gpu.registers_per_sm,
            L2_cache_size=gpu.l2_bytes, gcnArchName=gpu.name, uuid=_CUuuid(uuid.uuid5(_NAMESPACE, f"{gpu.key}/{index}")),
            pci_bus_id=0, pci_device_id=index + 1, pci_domain_id=0,
        )  # fmt: skip

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __repr__(self) -> str:
        shown = vars(self)
        return (
            "_CudaDeviceProperties(name='{name}', major={major}, minor={minor}, total_memory={total}MB, "
            "multi_processor_count={multi_processor_count}, uuid={uuid}, pci_bus_id={pci_bus_id}, "
            "pci_device_id={pci_device_id}, pci_domain_id={pci_domain_id}, L2_cache_size={cache}MB)"
        ).format(**shown, total=shown["total_memory"] // MIB, cache=shown["L2_cache_size"] // MIB)


class _Process:
    """Whether CUDA was initialised in this process, or in a parent before the fork."""

    touched = False
    in_bad_fork = False


@contextmanager
def untouched() -> Iterator[None]:
    """Do not count what happens inside as a use of CUDA, so that later forks still can use it."""
    before = _Process.touched
    try:
        yield
    finally:
        _Process.touched = before


def _require_init() -> None:
    """Make PyTorch's native side call `torch.cuda._lazy_init` again before the next tensor on the device."""
    python_side = ctypes.PyDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_python.so"))
    getattr(python_side, _REQUIRE_INIT)(ctypes.c_int8(_CUDA), ctypes.c_bool(True))


def _after_fork() -> None:
    if _Process.touched:
        _Process.in_bad_fork = True
        _require_init()


os.register_at_fork(after_in_child=_after_fork)


def install(cards: Cards, patches: Patches) -> None:
    """Supply the functions, and reset `torch.cuda` to the state of a fresh process."""
    patches.set(_Process, "touched", False)
    _require_init()
    patches.on_undo(_require_init)
    release = release_of(cards.at(0).torch_version)
    properties = [_CudaDeviceProperties(device.gpu, index) for index, device in enumerate(cards.devices)]
    hidden_from_outside, debug_mode = os.environ.get("CUDA_VISIBLE_DEVICES"), [0]

    def init() -> None:
        """Set what PyTorch's native initialisation sets in `torch.cuda`."""
        _Process.touched = True
        generators = tuple(torch.ops.tonnage.default_generator(index) for index in range(len(cards)))
        patches.set(torch.cuda, "default_generators", generators)
        patches.set(torch.cuda, "_get_device_properties", properties.__getitem__)

    def visible_cards() -> int:
        """Return the number of cards, 0 if the script itself has hidden them, without initialising CUDA."""
        is_changed = os.environ.get("CUDA_VISIBLE_DEVICES") != hidden_from_outside
        return 0 if is_changed and not torch.cuda._parse_visible_devices() else len(cards)

    def device_count() -> int:
        _Process.touched = True
        return visible_cards()

    def set_device(index: int) -> None:
        """Select a card. This initialises CUDA, as in PyTorch; fake tensors check for that."""
        torch.cuda._lazy_init()
        cards.selected = index

    def exchange_device(index: int) -> int:
        """Select a card and return the previous one; a negative index does nothing."""
        if index < 0:
            return -1
        before, cards.selected = cards.selected, index
        return before

    def maybe_exchange_device(index: int) -> int:
        """Do the same; PyTorch's compiler expects two such functions."""
        return exchange_device(index)

    def is_in_bad_fork() -> bool:
        return _Process.in_bad_fork

    major, minor, patch = release.nccl
    patches.set_all(
        torch._C,
        {
            "_cuda_init": init,
            "_cuda_isInBadFork": is_in_bad_fork,
            "_cuda_getDeviceCount": device_count,
            "_cuda_getDevice": lambda: cards.selected,
            "_cuda_setDevice": set_device,
            "_cuda_exchangeDevice": exchange_device,
            "_cuda_maybeExchangeDevice": maybe_exchange_device,
            "_cuda_hasPrimaryContext": lambda index: torch.cuda.is_initialized(),
            "_cuda_synchronize": lambda: cards.at().synchronize(),
            "_cuda_canDeviceAccessPeer": lambda index, peer: index != peer,  # any two cards of a machine
            # The mode has no effect, because nothing here synchronizes.
            "_cuda_get_sync_debug_mode": lambda: debug_mode[0],
            "_cuda_set_sync_debug_mode": lambda mode: debug_mode.__setitem__(0, mode),
            "_cuda_getArchFlags": lambda: release.architectures,
            "_cuda_getCompiledVersion": lambda: release.cuda_number,
            "_nccl_version": lambda: major << 32 | minor << 16 | patch,
            "_nccl_version_suffix": lambda: b"",
            **dict.fromkeys(("_has_cuda", "_has_cudnn", "_has_magma", "_has_cusparselt"), True),
        },
    )
    # The module state of `torch.cuda` as just imported, in a build with CUDA.
    patches.set_all(
        torch.cuda,
        {
            "_initialized": False,
            "_is_in_bad_fork": is_in_bad_fork,
            "_queued_calls": list(torch.cuda._queued_calls),
            "_lazy_seed_tracker": _LazySeedTracker(),
            "_cached_device_count": None,
            "_exchange_device": exchange_device,
            "_maybe_exchange_device": maybe_exchange_device,
            "_device_count_nvml": visible_cards,
            "_CudaDeviceProperties": _CudaDeviceProperties,
            "has_magma": True,
        },
    )
    patches.set(torch.version, "cuda", release.cuda)
    torch.cuda._check_bf16_tensor_supported.cache_clear()
    patches.on_undo(torch.cuda._check_bf16_tensor_supported.cache_clear)
    for index in range(len(cards)):
        patches.on_undo(partial(cards.library.tonnage_set_stream, index, 0))
    patches.on_undo(lambda: setattr(cards, "selected", 0))
