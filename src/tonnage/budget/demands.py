"""What a plan needs of each part of the hardware, and what there is: the one test of whether a plan fits.

Every kind of plan lists its demands. It fits if all of them are met, and what it says of not fitting are those that are
not: the headline, the exit status, the JSON and `--export` ask nothing else. A demand holds plain numbers for one plan,
or arrays for the many configurations of a search.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tonnage.units import GIB

if TYPE_CHECKING:
    # NumPy is slow to import, and a plan of plain numbers does not need it.
    from tonnage.budget.training.configuration import Quantity

Part = Literal["GPU", "shared memory", "host", "drives", "loading on the host", "loading on the GPU", "KV cache"]

_WORDS: dict[Part, str] = {
    "GPU": "a GPU needs {needed} and has {available}",
    "shared memory": "a GPU and its host share {available} and need {needed}",
    "host": "a host needs {needed} of memory and has {available}",
    "drives": "the drives of a host must hold {needed} and hold {available}",
    "loading on the host": "loading needs {needed} of a host's memory, which has {available}",
    "loading on the GPU": "loading needs {needed} of a GPU, which has {available}",
    "KV cache": "the KV cache has no room for one sequence",
}
_MOST_DIGITS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Bytes that a plan needs of one part, and that the part has. `gpus`: how many GPUs share the part."""

    part: Part
    needed_bytes: Quantity
    available_bytes: int
    gpus: int = 1

    @property
    def is_met(self) -> Any:
        """Whether there is enough: one answer, or one for each configuration."""
        return self.needed_bytes <= self.available_bytes

    @property
    def while_loading(self) -> bool:
        """Whether the bytes are needed before the first step."""
        return self.part.startswith("loading")

    @property
    def missing_bytes(self) -> Any:
        """What is missing for each GPU; 0 if there is enough."""
        return (self.needed_bytes - self.available_bytes) * (self.needed_bytes > self.available_bytes) / self.gpus

    @property
    def words(self) -> str:
        """Both figures of one plan in a sentence."""
        needed = available = ""
        digits = 1
        # As many digits as it takes to tell the two apart.
        while needed == available and digits <= _MOST_DIGITS:
            needed = f"{self.needed_bytes / GIB:,.{digits}f} GiB"
            available = f"{self.available_bytes / GIB:,.{digits}f} GiB"
            digits += 1
        return _WORDS[self.part].format(needed=needed, available=available)


def shortages(demands: Iterable[Demand]) -> tuple[Demand, ...]:
    """Return the demands of one plan that are not met."""
    return tuple(demand for demand in demands if not demand.is_met)
