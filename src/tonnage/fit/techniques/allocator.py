"""Settings of PyTorch's caching allocator that can be changed while a process runs, and a limit to what it reserves.

Expandable segments grow instead of lying beside each other with holes between them, so reserved bytes come down to
about those allocated. Segments taken before stay as they are until they are empty: from the start of a process the
same is PYTORCH_ALLOC_CONF=expandable_segments:True. It does not know what is allocated.
"""

import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

import torch

from tonnage.fit.technique import Technique
from tonnage.fit.training import Training, Undo
from tonnage.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings(Technique):
    """`limit_bytes`: what the allocator may reserve, None for all that the card has; beyond it PyTorch raises."""

    name: ClassVar[str] = "allocator"
    title: ClassVar[str] = "allocator settings"
    order: ClassVar[int] = 95
    hint: ClassVar[str] = "Leave the allocator's settings as they are."

    expandable_segments: bool = True
    limit_bytes: int | None = None

    def why_not(self, training: Training) -> str | None:
        if training.device.type != "cuda":
            return f"Tensors on {training.device.type} do not come from CUDA's caching allocator."
        backend = torch.cuda.memory.get_allocator_backend()
        if backend != "native":
            return f"The allocator in use is {backend}, which has no segments to expand; these settings are the native one's."
        if self.limit_bytes is None:
            return None
        capacity_bytes = _capacity_bytes(training.device)
        if not 0 < self.limit_bytes <= capacity_bytes:
            asked, had = format_bytes(self.limit_bytes), format_bytes(capacity_bytes)
            return f"A limit of {asked} was asked for; this card has {had}."
        return None

    def place(self, training: Training, stack: ExitStack) -> None:
        # Undone last: what was cached under these settings goes back to the card.
        stack.callback(torch.cuda.empty_cache)
        stack.callback(_set(_settings(), expandable_segments=self.expandable_segments))
        if self.limit_bytes is not None:
            before = torch.cuda.get_per_process_memory_fraction(training.device)
            share = self.limit_bytes / _capacity_bytes(training.device)
            torch.cuda.set_per_process_memory_fraction(share, training.device)
            stack.callback(torch.cuda.set_per_process_memory_fraction, before, training.device)
        torch.cuda.empty_cache()


def with_setting(settings: str, name: str, value: str) -> str:
    """ "a:1,b:2" with one of them changed or added. Each call of PyTorch starts some settings over: say them all."""
    others = [item for item in _items(settings) if item.partition(":")[0].strip() != name]
    return ",".join([*others, f"{name}:{value}"])


def _items(settings: str) -> list[str]:
    """Split at commas, but not inside brackets: roundup_power2_divisions:[256:1,512:2]."""
    items, depth = [""], 0
    for character in settings:
        depth += (character == "[") - (character == "]")
        if character == "," and not depth:
            items.append("")
        else:
            items[-1] += character
    return [item for item in items if item.strip()]


def _settings() -> str:
    """What is set now. Before 2.12 PyTorch does not tell, and it is what the process was started with."""
    if hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        return torch._C._accelerator_getAllocatorSettings()
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


def _tell(settings: str) -> None:
    """Give settings to the live allocator, by the name that this PyTorch has for it."""
    tell = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    tell(settings)


def _set(before: str, *, expandable_segments: bool) -> Undo:
    _tell(with_setting(before, "expandable_segments", str(expandable_segments)))
    # Said outright: an empty text would leave the setting as it is now.
    said = any(item.startswith("expandable_segments") for item in _items(before))
    plain = before if said else with_setting(before, "expandable_segments", "False")
    return lambda: _tell(plain)


def _capacity_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory
