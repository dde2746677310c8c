"""A rank's connection to the hub: it sends messages, and waits only where it asks for values of other ranks.

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

from multiprocessing.connection import Connection
from typing import Any

from tonnage.virtual.cluster.calls import Payload, SendReceive


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
