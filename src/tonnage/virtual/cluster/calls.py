"""One collective or message as a rank called it: what the hub compares between ranks and what a report names."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Every rank of a group gives the same shape to these; what the others are given may differ from rank to rank.
_ALIKE = frozenset("all_reduce broadcast reduce all_gather_into_tensor reduce_scatter_tensor".split())

Payload = Any  # host tensors, or None where nobody knows the values


@dataclass(frozen=True, slots=True)
class Group:
    """A group as one of its ranks sees it.

    Its ranks and `copy`, which numbers groups of the same ranks, say which group it is. `role` numbers the groups that
    a rank is in, in the order of their making: groups of one role are each other's likeness on other ranks.
    """

    ranks: tuple[int, ...]
    copy: int
    role: int
    backend: str

    @property
    def identity(self) -> tuple[tuple[int, ...], int]:
        """The same for all its ranks."""
        return self.ranks, self.copy

    @property
    def words(self) -> str:
        """ " in group 2 of ranks 0–3"; nothing of the first group, which is the world."""
        number = f"group {self.role} of " if self.copy else "the group of "
        return f" in {number}{rank_names(self.ranks)}" if self.role else ""


@dataclass(frozen=True, slots=True)
class Call:
    """A collective: its number in the group, what it is, on what, from where."""

    rank: int
    group: Group
    number: int
    operation: str
    shapes: tuple[tuple[int, ...], ...] = ()
    dtype: str = ""
    stream: int = 0
    line: str = ""
    manner: str = ""  # "max", "from rank 3": what must be alike beside the shape

    @property
    def words(self) -> str:
        """ "rank 3 calls all_reduce of float32 [8] at train.py:30"."""
        return f"rank {self.rank} calls {self.what}{at(self.line)}"

    @property
    def what(self) -> str:
        """ "all_reduce of float32 [8]"; how it is reduced is said where it is not the sum."""
        shapes = ", ".join(str(list(shape)) for shape in self.shapes[:2]) + ", …" * (len(self.shapes) > 2)
        on = f" of {self.dtype} {shapes}" if shapes else ""
        manner = f" ({self.manner})" if self.manner not in ("", "sum") else ""
        return f"{self.operation}{manner}{on}{self.group.words}"

    def agrees_with(self, other: "Call") -> bool:
        """Whether two ranks of one group called the same thing."""
        if (self.operation, self.dtype, self.manner) != (other.operation, other.dtype, other.manner):
            return False
        return self.operation not in _ALIKE or self.shapes == other.shapes


@dataclass(frozen=True, slots=True)
class Message:
    """One end of a send and receive: the places of both in the group, and the number of the message between them."""

    rank: int
    group: Group
    source: int
    target: int
    number: int
    elements: int
    dtype: str
    line: str
    is_send: bool

    @property
    def peer(self) -> int:
        """The rank at the other end."""
        return self.group.ranks[self.target if self.is_send else self.source]

    @property
    def words(self) -> str:
        """ "rank 3 sends 4096 elements of bfloat16 to rank 4 at train.py:30"."""
        verb, towards = ("sends", "to") if self.is_send else ("receives", "from")
        return f"rank {self.rank} {verb} {self._size} {towards} rank {self.peer}{self.group.words}{at(self.line)}"

    @property
    def what(self) -> str:
        """ "send of 4096 elements of bfloat16 to rank 4"."""
        verb, towards = ("send", "to") if self.is_send else ("receive", "from")
        return f"{verb} of {self._size} {towards} rank {self.peer}{self.group.words}"

    @property
    def _size(self) -> str:
        return f"{self.elements} element{'s' * (self.elements != 1)} of {self.dtype}"

    def agrees_with(self, other: "Message") -> bool:
        """Whether what is sent is what is received."""
        return (self.elements, self.dtype) == (other.elements, other.dtype)


def rank_names(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0 and 1", "ranks 0–3", "ranks 0, 8, … 1016"."""
    first, last = ranks[0], ranks[-1]
    if len(ranks) == 1:
        return f"rank {first}"
    if len(ranks) == 2:
        return f"ranks {first} and {last}"
    if tuple(ranks) == tuple(range(first, last + 1)):
        return f"ranks {first}–{last}"
    return f"ranks {first}, {ranks[1]}, {'… ' * (len(ranks) > 3)}{last}"


def at(line: str) -> str:
    """Where, if that is known."""
    return f" at {line}" if line else ""
