"""What a kernel or an operator must do, whatever does it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """What must be done: operations, and bytes to and from memory; None where that is not known."""

    operations: float | None
    moved_bytes: float | None
    precision: str = "fp32"

    @property
    def intensity(self) -> float | None:
        """Operations on each byte."""
        return self.operations / self.moved_bytes if self.operations and self.moved_bytes else None
