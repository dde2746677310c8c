"""A world of one on a single card: supports `init_process_group("nccl")`, DDP and FSDP in a script run without a
launcher.

There is no hub and no other process: each collective returns the rank's own contribution.
"""

from collections.abc import Sequence
from typing import Any

from tonnage.virtual.cluster.calls import Collective, Payload, SendReceive
from tonnage.virtual.cluster.exchange import PeerError


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


def install(session: Any, patches: Any) -> None:
    """Make `torch.distributed` a world of one on the session's card, unless torch has NCCL itself."""
    import torch.distributed as dist

    if not dist.is_available() or dist.is_nccl_available():
        return
    from tonnage.virtual.cluster import distributed
    from tonnage.virtual.cluster.member import Member

    exchange = OwnExchange()
    member = Member(0, 1, session, exchange)
    distributed.install(member, distributed.HubStore(exchange, member.line), patches)
