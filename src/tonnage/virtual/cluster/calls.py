"""One collective or message as a rank called it: what the hub compares between ranks and what a report names."""

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

    @property
    def words(self) -> str:
        """ "rank 3 calls all_reduce of float32 [8] at train.py:30"."""
        shapes = ", ".join(str(list(shape)) for shape in self.shapes[:2]) + ", …" * (len(self.shapes) > 2)
        what = f" of {self.dtype} {shapes}" if shapes else ""
        return f"rank {self.rank} calls {self.operation}{what}{_at(self.line)}"

    def agrees_with(self, other: "Call") -> bool:
        """Whether two ranks of one group called the same thing."""
        if (self.operation, self.dtype) != (other.operation, other.dtype):
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
        what = f"{self.elements} element{'s' * (self.elements != 1)} of {self.dtype}"
        return f"rank {self.rank} {verb} {what} {towards} rank {self.peer}{_at(self.line)}"

    def agrees_with(self, other: "Message") -> bool:
        """Whether what is sent is what is received."""
        return (self.elements, self.dtype) == (other.elements, other.dtype)


def _at(line: str) -> str:
    return f" at {line}" if line else ""
