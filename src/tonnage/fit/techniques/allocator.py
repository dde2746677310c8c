"""Settings of PyTorch's caching allocator that can change at run time, and a limit to reserved bytes.

Expandable segments grow instead of leaving gaps between segments, so reserved bytes shrink to about the allocated
ones. Existing segments stay until they are empty; PYTORCH_ALLOC_CONF=expandable_segments:True acts from the start.
"""

import os
import re
from contextlib import ExitStack

import torch

from tonnage.fit.technique import Technique
from tonnage.fit.training import Training
from tonnage.units import format_bytes


class SetAllocator(Technique, name="allocator"):
    """Sets the allocator; PyTorch raises beyond `limit_bytes` reserved bytes (None: the whole card)."""

    expandable_segments: bool = True
    limit_bytes: int | None = None

    def why_not(self, training: Training) -> str | None:
        if training.device.type != "cuda":
            return f"Tensors on {training.device.type} do not come from CUDA's caching allocator."
        backend = torch.cuda.memory.get_allocator_backend()
        if backend != "native":
            return f"The allocator in use is {backend}, which has no segments to expand; these settings are the native one's."
        capacity_bytes = _capacity_bytes(training.device)
        if self.limit_bytes is None or 0 < self.limit_bytes <= capacity_bytes:
            return None
        return (
            f"A limit of {format_bytes(self.limit_bytes)} was asked for; this card has {format_bytes(capacity_bytes)}."
        )

    def place(self, training: Training, stack: ExitStack) -> None:
        # Undone last: return to the card what was cached under these settings.
        stack.callback(torch.cuda.empty_cache)
        # PyTorch before 2.12 cannot tell its settings, so use those from process start.
        before = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        if hasattr(torch._C, "_accelerator_getAllocatorSettings"):
            before = torch._C._accelerator_getAllocatorSettings()
        _tell(with_setting(before, "expandable_segments", str(self.expandable_segments)))
        # Explicitly False: an empty string would leave the setting unchanged.
        said = any(item.startswith("expandable_segments") for item in _items(before))
        stack.callback(_tell, before if said else with_setting(before, "expandable_segments", "False"))
        if self.limit_bytes is not None:
            share_before = torch.cuda.get_per_process_memory_fraction(training.device)
            share = self.limit_bytes / _capacity_bytes(training.device)
            torch.cuda.set_per_process_memory_fraction(share, training.device)
            stack.callback(torch.cuda.set_per_process_memory_fraction, share_before, training.device)
        torch.cuda.empty_cache()


def with_setting(settings: str, name: str, value: str) -> str:
    """Return "a:1,b:2" with one setting changed or added. Each PyTorch call resets some settings, so pass them all."""
    others = [item for item in _items(settings) if item.partition(":")[0].strip() != name]
    return ",".join([*others, f"{name}:{value}"])


def _items(settings: str) -> list[str]:
    """Split at commas, but not inside brackets: roundup_power2_divisions:[256:1,512:2]."""
    return [item for item in re.split(r",(?![^\[]*\])", settings) if item.strip()]


def _tell(settings: str) -> None:
    tell = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    tell(settings)


def _capacity_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory
