"""A rank's connection to the hub: calls are sent one way, and the rank waits only where it needs values of other ranks.

In a world of one there is no hub and no other process: each collective returns the rank's own contribution. It supports
`init_process_group("nccl")`, DDP and FSDP in a script run without a launcher.
"""

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


class OwnExchange:
    """Has the methods of `HubExchange` for a world of one, with a store in memory."""

    def __init__(self) -> None:
        self._parts: dict[Any, Payload] = {}
        self._store: dict[str, bytes] = {}

    def made(self, ranks: Sequence[int]) -> None:
        """Do nothing: no other rank needs to know of the group."""

    def part_mesh(self, words: str, size: int) -> None:
        """Do nothing: a mesh cannot have fewer ranks than one."""

    def contribute(self, call: Collective, payload: Payload) -> None:
        if payload is not None:
            self._parts[call.group.identity, call.number] = payload

    def collect(self, call: Collective) -> list[Payload]:
        return [self._parts.pop((call.group.identity, call.number), None)]

    def tell(self, message: SendReceive, payload: Payload) -> None:
        if message.is_send:
            self._parts[message.group.identity, "message", message.number] = payload

    def receive(self, message: SendReceive) -> Payload:
        return self._parts.pop((message.group.identity, "message", message.number), None)

    def keep(self, key: str, value: bytes) -> None:
        self._store[key] = value

    def look_up(self, action: str, key: str, value: Any = None) -> Any:
        if action == "add":
            total = int(self._store.get(key, b"0")) + value
            self._store[key] = str(total).encode()
            return total
        if action == "check":
            return key in self._store
        if action == "delete":
            return self._store.pop(key, None) is not None
        if key not in self._store:
            raise PeerError(f"The script waits for the key {key!r} of a store, and in a world of one nobody sets it.")
        return self._store[key]


def install_alone(session: Any, patches: Any) -> None:
    """Make `torch.distributed` a world of one on the session's card, unless torch has NCCL itself."""
    import torch.distributed as dist

    if not dist.is_available() or dist.is_nccl_available():
        return
    from tonnage.virtual.cluster import distributed
    from tonnage.virtual.cluster.member import Member

    exchange = OwnExchange()
    member = Member(0, 1, session, exchange)
    distributed.install(member, distributed.HubStore(exchange, member.line), patches)
