"""Profiles of a training before any change: bytes and seconds per block. Plain data, no torch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

Profile = TypeVar("Profile", bound="BlockProfile | OutsideProfile")


@dataclass(frozen=True, kw_only=True)
class OperatorProfile:
    """One operator call in a block's forward pass."""

    index: int
    name: str  # "aten.mm.default"
    output_bytes: int  # bytes of newly allocated storages
    kept_bytes: int  # bytes of those that are saved for backward
    seconds: float
    inputs: tuple[int, ...] = ()  # indices of the operators whose outputs it reads
    base: int | None = None  # the operator whose storage it views or writes into
    writes: bool = False  # changes a tensor in place
    keepable: bool = True  # whether its output can be saved for backward unchanged
    repeatable: bool = True  # False for collectives and for operators that change a tensor from outside the block


@dataclass(frozen=True, kw_only=True)
class BlockProfile:
    """One block at one micro-batch size, in one of the modes in which it can run."""

    name: str = "keep"  # of the mode
    parameters_bytes: int
    input_bytes: int  # what recomputing it must keep
    kept_bytes: int  # on the GPU between forward and backward, including the input if that is saved
    forward_peak_bytes: int  # peak during forward above its start, kept bytes included
    backward_peak_bytes: int  # peak during backward above its start, without its kept bytes and gradients
    forward_s: float
    backward_s: float
    forward_host_s: float = 0.0  # host time to launch it
    backward_host_s: float = 0.0
    moved_bytes: int = 0  # to the host in forward, and back in backward

    @property
    def host_s(self) -> float:
        return self.forward_host_s + self.backward_host_s


@dataclass(frozen=True, kw_only=True)
class OutsideProfile:
    """Everything outside the blocks: embedding, head, loss."""

    kept_bytes: int  # while blocks run backward, including the gradient of their output
    peak_bytes: int  # between the blocks' forward and backward, above the start of the step
    stem_peak_bytes: int = 0  # before the first block's forward and after its backward
    # Peak between each block and the previous one, from the second block on; 0 where nothing runs.
    between_peak_bytes: tuple[int, ...] = ()
    forward_s: float
    backward_s: float
    forward_host_s: float = 0.0
    backward_host_s: float = 0.0

    def in_line(self, other: "OutsideProfile", share: float) -> "OutsideProfile":
        """Interpolate linearly towards another size, or beyond it. Host times are kept: larger batches launch no more."""
        found = mixed(lambda below, above: max(0.0, below + share * (above - below)), self, other)
        return replace(found, forward_host_s=other.forward_host_s, backward_host_s=other.backward_host_s)


def mixed(mix: Callable[..., float], first: Profile, *others: Profile) -> Profile:
    """Return the first profile with each number mixed with those of the others; whole numbers stay whole."""
    found: dict[str, Any] = {}
    for name, value in vars(first).items():
        values = [value, *(getattr(other, name) for other in others)]
        if isinstance(value, str):
            found[name] = value
        elif isinstance(value, tuple):
            found[name] = tuple(round(mix(*each)) for each in zip(*values, strict=False))
        else:
            found[name] = round(mix(*values)) if isinstance(value, int) else mix(*values)
    return replace(first, **found)
