"""Device count and selection, initialisation, and the versions that a CUDA build reports."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch._utils import _LazySeedTracker

from tonnage.virtual.cuda import forks
from tonnage.virtual.cuda.cards import Cards
from tonnage.virtual.cuda.patches import Patches
from tonnage.virtual.cuda.properties import properties_of
from tonnage.virtual.cuda.releases import release_of


class _Devices:
    """The functions of `torch._C` about cards."""

    def __init__(self, cards: Cards, patches: Patches) -> None:
        self.cards = cards
        self._patches = patches
        self._properties = [properties_of(device.gpu, index) for index, device in enumerate(cards.devices)]
        self._hidden_from_outside = os.environ.get("CUDA_VISIBLE_DEVICES")
        self._sync_debug_mode = 0

    def init(self) -> None:
        """Set what PyTorch's native initialisation sets in `torch.cuda`."""
        forks.touch()
        generators = tuple(torch.ops.tonnage.default_generator(index) for index in range(len(self.cards)))
        self._patches.set(torch.cuda, "default_generators", generators)
        self._patches.set(torch.cuda, "_get_device_properties", self._properties.__getitem__)

    def count(self) -> int:
        """Return the number of cards; 0 if the script itself has hidden them."""
        forks.touch()
        return self.count_quietly()

    def count_quietly(self) -> int:
        """Return the count without initialising CUDA, as NVML would."""
        variable = os.environ.get("CUDA_VISIBLE_DEVICES")
        if variable != self._hidden_from_outside and not torch.cuda._parse_visible_devices():
            return 0
        return len(self.cards)

    def get(self) -> int:
        return self.cards.selected

    def set(self, index: int) -> None:
        """Select a card. This initialises CUDA, as in PyTorch; fake tensors check for that."""
        torch.cuda._lazy_init()
        self.cards.selected = index

    def exchange(self, index: int) -> int:
        """Select a card and return the previous one; a negative index does nothing."""
        if index < 0:
            return -1
        before = self.cards.selected
        if before != index:
            self.cards.selected = index
        return before

    def exchange_back(self, index: int) -> int:
        """Select a card and return the previous one; PyTorch's compiler expects two such functions."""
        return self.exchange(index)

    def synchronize(self) -> None:
        self.cards.at().synchronize()

    def can_access_peer(self, index: int, peer: int) -> bool:
        """Return True for any two different cards of a machine."""
        return index != peer

    def get_sync_debug_mode(self) -> int:
        return self._sync_debug_mode

    def set_sync_debug_mode(self, mode: int) -> None:
        """Store the mode; it has no effect because nothing here synchronizes."""
        self._sync_debug_mode = mode


def install(cards: Cards, patches: Patches) -> None:
    """Supply the functions, and reset `torch.cuda` to the state of a fresh process."""
    release = release_of(cards.at(0).torch_version)
    devices = _Devices(cards, patches)
    functions: dict[str, Callable[..., Any]] = {
        "_cuda_init": devices.init,
        "_cuda_getDeviceCount": devices.count,
        "_cuda_getDevice": devices.get,
        "_cuda_setDevice": devices.set,
        "_cuda_exchangeDevice": devices.exchange,
        "_cuda_maybeExchangeDevice": devices.exchange_back,
        "_cuda_hasPrimaryContext": lambda index: torch.cuda.is_initialized(),
        "_cuda_synchronize": devices.synchronize,
        "_cuda_canDeviceAccessPeer": devices.can_access_peer,
        "_cuda_get_sync_debug_mode": devices.get_sync_debug_mode,
        "_cuda_set_sync_debug_mode": devices.set_sync_debug_mode,
        "_cuda_sleep": lambda cycles: None,
        "_cuda_ipc_collect": lambda: None,
        "_cuda_lock_mutex": lambda: None,
        "_cuda_unlock_mutex": lambda: None,
        "_cuda_getArchFlags": lambda: release.architectures,
        "_cuda_getCompiledVersion": lambda: release.cuda_number,
        "_cuda_getHipblasltVersion": lambda: None,
        "_cuda_tunableop_is_enabled": lambda: False,
        "_cuda_tunableop_tuning_is_enabled": lambda: False,
        "_nccl_version": lambda: release.nccl[0] << 32 | release.nccl[1] << 16 | release.nccl[2],
        "_nccl_version_suffix": lambda: b"",
    }
    patches.set_all(torch._C, functions)
    # The module state of `torch.cuda` as just imported, in a build with CUDA.
    fresh = {
        "_initialized": False,
        "_queued_calls": list(torch.cuda._queued_calls),
        "_lazy_seed_tracker": _LazySeedTracker(),
        "_cached_device_count": None,
        "_exchange_device": devices.exchange,
        "_maybe_exchange_device": devices.exchange_back,
        "_device_count_nvml": devices.count_quietly,
        "_CudaDeviceProperties": type(devices._properties[0]),
        "has_magma": True,
    }
    patches.set_all(torch.cuda, fresh)
    patches.set(torch.version, "cuda", release.cuda)
    for name in ("_has_cuda", "_has_cudnn", "_has_magma", "_has_cusparselt"):
        patches.set(torch._C, name, True)
    torch.cuda._check_bf16_tensor_supported.cache_clear()
    patches.on_undo(torch.cuda._check_bf16_tensor_supported.cache_clear)
    for index in range(len(cards)):
        patches.on_undo(lambda index=index: cards.set_stream(index, 0))  # type: ignore[misc]
    patches.on_undo(lambda: setattr(cards, "selected", 0))
