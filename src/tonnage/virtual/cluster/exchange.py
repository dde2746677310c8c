"""What ranks exchange through the hub: their collectives and messages, as they called them, and values.

A rank sends, and waits only where it asks for values of other ranks. The hub compares calls between ranks, and reports
name them.

| sent                           | means                                                                          |
|--------------------------------|--------------------------------------------------------------------------------|
| `made` ranks                   | a group of these ranks exists, whether or not this rank is in it               |
| `part_mesh` words, size        | a mesh has only the first `size` ranks                                         |
| `contribute` call, payload     | this rank's part of a collective                                               |
| `tell` message, payload        | one end of a message                                                           |
| `keep` `set`, key, value       | a key of the store that all ranks share                                        |
| `finish` report                | the rank has ended                                                             |

| asked                          | is answered with                                                               |
|--------------------------------|--------------------------------------------------------------------------------|
| `collect` call                 | the different parts of a collective, and for each rank of the group which it is |
| `receive` message              | what the other end of a message sent                                           |
| `keep` action, key, value      | the store's answer; the action is `get`, `add`, `check` or `delete`            |

In a world of one there is no hub and no other process: each collective returns the rank's own contribution. It supports
`init_process_group("nccl")`, DDP and FSDP in a script run without a launcher.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

# Operations whose shapes must be equal on all ranks of a group; shapes of the others may differ by rank.
_ALIKE = frozenset("all_reduce broadcast reduce all_gather_into_tensor reduce_scatter_tensor".split())

Payload = Any  # host tensors, or None where the values are unknown


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """A process group as one of its ranks sees it.

    The ranks and `copy`, which numbers groups of the same ranks, identify the group. `role` numbers the groups of one
    rank in creation order: groups with the same role on different ranks correspond to each other.
    """

    ranks: tuple[int, ...]
    copy: int
    role: int
    backend: str

    @property
    def identity(self) -> tuple[tuple[int, ...], int]:
        """A key that is the same on all ranks of the group."""
        return self.ranks, self.copy

    @property
    def words(self) -> str:
        """The group in words, such as " in group 2 of ranks 0–3"; "" for the world group."""
        number = f"group {self.role} of " if self.copy else "the group of "
        return f" in {number}{rank_names(self.ranks)}" if self.role else ""


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective: its number in the group, operation, tensors and line in the script."""

    rank: int
    group: ProcessGroup
    number: int
    operation: str
    shapes: tuple[tuple[int, ...], ...] = ()
    dtype: str = ""
    stream: int = 0
    line: str = ""
    manner: str = ""  # "max", "from rank 3": must match between ranks, like the shape

    @property
    def words(self) -> str:
        """The call in words: "rank 3 calls all_reduce of float32 [8] at train.py:30"."""
        return f"rank {self.rank} calls {self.what}{at(self.line)}"

    @property
    def what(self) -> str:
        """The operation in words: "all_reduce of float32 [8]", with the reduction where it is not a sum."""
        shapes = ", ".join(str(list(shape)) for shape in self.shapes[:2]) + ", …" * (len(self.shapes) > 2)
        on = f" of {self.dtype} {shapes}" if shapes else ""
        manner = f" ({self.manner})" if self.manner not in ("", "sum") else ""
        return f"{self.operation}{manner}{on}{self.group.words}"

    def agrees_with(self, other: "Collective") -> bool:
        """Whether two ranks of one group made the same call."""
        if (self.operation, self.dtype, self.manner) != (other.operation, other.dtype, other.manner):
            return False
        return self.operation not in _ALIKE or self.shapes == other.shapes


@dataclass(frozen=True, slots=True)
class SendReceive:
    """One end of a send and receive: source and target within the group, and the message's number between them."""

    rank: int
    group: ProcessGroup
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
        """The message in words: "rank 3 sends 4096 elements of bfloat16 to rank 4 at train.py:30"."""
        return f"rank {self.rank} {'sends' if self.is_send else 'receives'} {self._elements}{at(self.line)}"

    @property
    def what(self) -> str:
        """The operation in words: "send of 4096 elements of bfloat16 to rank 4"."""
        return f"{'send' if self.is_send else 'receive'} of {self._elements}"

    @property
    def _elements(self) -> str:
        count = f"{self.elements} element{'s' * (self.elements != 1)} of {self.dtype}"
        return f"{count} {'to' if self.is_send else 'from'} rank {self.peer}{self.group.words}"

    def agrees_with(self, other: "SendReceive") -> bool:
        """Whether the send matches the receive."""
        return (self.elements, self.dtype) == (other.elements, other.dtype)


def rank_names(ranks: Sequence[int]) -> str:
    """Return ranks in words: "rank 3", "ranks 0 and 1", "ranks 0–3", "ranks 0, 8, … 1016"."""
    first, last = ranks[0], ranks[-1]
    if len(ranks) == 1:
        return f"rank {first}"
    if len(ranks) == 2:
        return f"ranks {first} and {last}"
    if tuple(ranks) == tuple(range(first, last + 1)):
        return f"ranks {first}–{last}"
    return f"ranks {first}, {ranks[1]}, {'… ' * (len(ranks) > 3)}{last}"


def at(line: str) -> str:
    """Return " at train.py:30", or "" if the line is unknown."""
    return f" at {line}" if line else ""


class PeerError(RuntimeError):
    """Raised in a rank whose peer never arrives, or that made a different call than its peers."""


class HubExchange:
    """Exchanges messages with the hub over a pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def send(self, *message: Any) -> None:
        self._pipe.send(message)

    def ask(self, *question: Any) -> Any:
        self._pipe.send(question)
        kind, answer = self._pipe.recv()
        if kind == "fail":
            raise PeerError(answer)
        return answer


class OwnExchange:
    """Answers the same messages in a world of one, with a store in memory."""

    def __init__(self) -> None:
        self._parts: dict[Any, Payload] = {}
        self._store: dict[str, bytes] = {}

    def send(self, *message: Any) -> None:
        match message:
            case "contribute", call, payload if payload is not None:
                self._parts[call.group.identity, call.number] = payload
            case "tell", SendReceive(is_send=True) as sent, payload:
                self._parts[sent.group.identity, "message", sent.number] = payload
            case "keep", "set", key, value:
                self._store[key] = value

    def ask(self, *question: Any) -> Any:
        match question:
            case "collect", call:
                return [self._parts.pop((call.group.identity, call.number), None)], [0]
            case "receive", message:
                return self._parts.pop((message.group.identity, "message", message.number), None)
            case "keep", "add", key, amount:
                self._store[key] = str(int(self._store.get(key, b"0")) + amount).encode()
                return int(self._store[key])
            case "keep", "check", key, _:
                return key in self._store
            case "keep", "delete", key, _:
                return self._store.pop(key, None) is not None
            case "keep", "get", key, _ if key in self._store:
                return self._store[key]
        raise PeerError(
            f"The script waits for the key {question[2]!r} of a store, and in a world of one nobody sets it."
        )


Exchange = HubExchange | OwnExchange
