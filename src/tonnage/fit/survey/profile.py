"""What was seen of a training before anything was changed: bytes and seconds, block by block. Plain data, no torch."""

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class OperatorProfile:
    """One operator call of a block's forward pass, in order."""

    index: int
    name: str  # "aten.mm.default"
    output_bytes: int  # of storages that it made new
    kept_bytes: int  # of those that backward keeps
    seconds: float
    inputs: tuple[int, ...] = ()  # indices of the operators whose outputs it reads
    base: int | None = None  # the operator whose storage it gives a view of or writes into
    writes: bool = False  # changes a tensor in place
    keepable: bool = True  # its output can be kept for backward and be the same then
    repeatable: bool = True  # False for collectives and for what changes a tensor from outside


@dataclass(frozen=True, kw_only=True)
class BlockProfile:
    """One block at one micro-batch."""

    name: str  # "model.layers.7"
    parameters_bytes: int
    input_bytes: int  # what recomputing it must keep
    kept_bytes: int  # what its forward leaves for backward, the input counted where it is among it
    forward_peak_bytes: int  # beyond what was there when it began, while it runs, kept bytes included
    backward_peak_bytes: int  # beyond what was there when its backward began, without its kept bytes and gradients
    forward_s: float
    backward_s: float
    forward_host_s: float = 0.0  # of the host, which launches it
    backward_host_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class OutsideProfile:
    """Everything but the blocks: embedding, head, loss."""

    kept_bytes: int  # while blocks run backward, their output's gradient counted in
    peak_bytes: int  # once blocks have run forward and before they run backward, beyond what was there at the beginning
    stem_peak_bytes: int = 0  # before the first block's forward, and after its backward
    # Between each block and the one before it, from the second on; 0 where nothing happens there.
    between_peak_bytes: tuple[int, ...] = ()
    forward_s: float
    backward_s: float
    forward_host_s: float = 0.0
    backward_host_s: float = 0.0

    def in_line(self, other: "OutsideProfile", share: float) -> "OutsideProfile":
        """So far on the way to another size, or beyond it. A larger batch takes no more launches."""

        def mixed(name: str, below: float, above: float) -> float:
            value = max(0.0, below + share * (above - below))
            return round(value) if name.endswith("_bytes") else value

        names = ("kept_bytes", "peak_bytes", "stem_peak_bytes", "forward_s", "backward_s")
        numbers: dict[str, Any] = {name: mixed(name, getattr(self, name), getattr(other, name)) for name in names}
        pairs = zip(self.between_peak_bytes, other.between_peak_bytes, strict=False)
        between = tuple(int(mixed("between_peak_bytes", *pair)) for pair in pairs)
        return replace(other, between_peak_bytes=between, **numbers)
