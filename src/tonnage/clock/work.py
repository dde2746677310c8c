"""What a kernel or operator must do, independent of the implementation."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """Operations, and bytes to and from memory; None if unknown."""

    operations: float | None
    moved_bytes: float | None
    precision: str = "fp32"

    @property
    def intensity(self) -> float | None:
        """Operations per byte."""
        return self.operations / self.moved_bytes if self.operations and self.moved_bytes else None
