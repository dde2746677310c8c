"""Devices whose GPU uses the host's memory: a GB10, a Jetson, a Strix Halo. Apple's have messages of their own.

On these, what PyTorch calls free is what the host has free, and the host's own memory is missing from it.
"""

from functools import cache

from tonnage.explain.text.tables import unified_devices
from tonnage.hardware.catalogue import cuda_cards
from tonnage.hardware.cluster import homes_of

# What the kernel keeps for itself varies a little with its version.
_TOLERANCE = 0.03


def unified_device(text: str, total_bytes: int | None) -> str:
    """Return what such a device is called, by a name in the text or its capacity; empty if there is none."""
    named = next((row.name for row in unified_devices() if row.mark.search(text)), "")
    if named or total_bytes is None:
        return named
    alike = [card for card in _capacities() if abs(card[0] - total_bytes) <= _TOLERANCE * card[0]]
    if not alike or not all(is_unified for _, is_unified, _ in alike):
        return ""
    return f"a device of this capacity ({alike[0][2]})"


@cache
def _capacities() -> list[tuple[int, bool, str]]:
    """Return bytes, whether the host has no memory apart from the GPU's, and the name of each card that runs CUDA."""
    found = []
    for card in cuda_cards():
        homes = homes_of(card)
        is_unified = bool(homes) and all(home.memory_bytes == 0 for home in homes)
        found.append((card.memory_bytes, is_unified, card.name))
    return found
