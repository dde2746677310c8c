"""A rank's line to the hub: what it calls is told one way; where values of other ranks are needed, it waits for them.

It knows neither torch nor what a call does.
"""

from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

from tonnage.virtual.cluster.calls import Call, Message, Payload


class PeerError(RuntimeError):
    """What a rank is told that waits for something which never comes, or that called another thing than its peers."""


class Exchange(Protocol):
    """What a group needs of the ranks around it."""

    def made(self, ranks: Sequence[int]) -> None:
        """A group of these ranks is made, whether or not this rank is in it."""

    def part_mesh(self, words: str, size: int) -> None:
        """A mesh is made that has only the first so many ranks."""

    def contribute(self, call: Call, payload: Payload) -> None:
        """This rank's part of a collective."""

    def collect(self, call: Call) -> list[Payload]:
        """Everybody's parts, by their places in the group."""

    def tell(self, message: Message, payload: Payload) -> None:
        """One end of a message."""

    def receive(self, message: Message) -> Payload:
        """What the other end of a message sent."""

    def keep(self, key: str, value: bytes) -> None:
        """Put into the store, which all ranks share."""

    def look_up(self, action: str, key: str, value: Any = None) -> Any:
        """Ask the store."""


class HubExchange:
    """Over a pipe to the hub."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def made(self, ranks: Sequence[int]) -> None:
        self._pipe.send(("made", tuple(ranks)))

    def part_mesh(self, words: str, size: int) -> None:
        self._pipe.send(("part_mesh", words, size))

    def contribute(self, call: Call, payload: Payload) -> None:
        self._pipe.send(("contribute", call, payload))

    def collect(self, call: Call) -> list[Payload]:
        parts, places = self._ask("collect", call)
        return [parts[place] for place in places]

    def tell(self, message: Message, payload: Payload) -> None:
        self._pipe.send(("tell", message, payload))

    def receive(self, message: Message) -> Payload:
        return self._ask("receive", message)

    def keep(self, key: str, value: bytes) -> None:
        self._pipe.send(("keep", "set", key, value))

    def look_up(self, action: str, key: str, value: Any = None) -> Any:
        return self._ask("keep", action, key, value)

    def finish(self, report: Any) -> None:
        """The rank is done; the last word."""
        self._pipe.send(("finish", report))

    def _ask(self, *words: Any) -> Any:
        self._pipe.send(words)
        kind, answer = self._pipe.recv()
        if kind == "fail":
            raise PeerError(answer)
        return answer
