"""A rank's connection to the hub: calls are sent one way, and the rank waits only where it needs values of other ranks."""

from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from tonnage.virtual.cluster.calls import Collective, Payload, SendReceive


class PeerError(RuntimeError):
    """Raised in a rank whose peer never arrives, or that made a different call than its peers."""


class HubExchange:
    """What a group needs from the other ranks, over a pipe to the hub."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def made(self, ranks: Sequence[int]) -> None:
        """Announce a group of these ranks, whether or not this rank is in it."""
        self._pipe.send(("made", tuple(ranks)))

    def part_mesh(self, words: str, size: int) -> None:
        """Announce a mesh with only the first `size` ranks."""
        self._pipe.send(("part_mesh", words, size))

    def contribute(self, call: Collective, payload: Payload) -> None:
        """Send this rank's part of a collective."""
        self._pipe.send(("contribute", call, payload))

    def collect(self, call: Collective) -> list[Payload]:
        """Return the parts of all ranks, in group order."""
        parts, places = self._ask("collect", call)
        return [parts[place] for place in places]

    def tell(self, message: SendReceive, payload: Payload) -> None:
        """Announce one end of a message."""
        self._pipe.send(("tell", message, payload))

    def receive(self, message: SendReceive) -> Payload:
        """Return what the other end of a message sent."""
        return self._ask("receive", message)

    def keep(self, key: str, value: bytes) -> None:
        """Set a key of the store that all ranks share."""
        self._pipe.send(("keep", "set", key, value))

    def look_up(self, action: str, key: str, value: Any = None) -> Any:
        """Query the store: "get", "add", "check" or "delete"."""
        return self._ask("keep", action, key, value)

    def finish(self, report: Any) -> None:
        """Send the rank's report; nothing follows it."""
        self._pipe.send(("finish", report))

    def _ask(self, *words: Any) -> Any:
        self._pipe.send(words)
        kind, answer = self._pipe.recv()
        if kind == "fail":
            raise PeerError(answer)
        return answer
