"""Where the ranks that run meet: it passes values between them, and knows who waits for whom.

Nothing times out here. A rank is told that its peer never comes as soon as that is certain: the peer has ended, or
everybody waits. Two ranks of one group that call different things are told both calls. It knows neither torch nor
processes: who is at the other end of a line is the business of `processes`.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tonnage.virtual.cluster.calls import Call, Message, Payload

_KEPT_CALLS = 64
Answer = tuple[str, Any]  # ("ok", value) or ("fail", words)
Reply = Callable[[Answer], None]


@dataclass
class Waiting:
    """A rank that waits for an answer."""

    words: str
    ready: Callable[[], Any]  # the answer, or None as long as there is none
    missing: Callable[[], set[int]]
    reply: Reply


@dataclass
class Journal:
    """What the ranks did together, for whoever classes and reports them."""

    groups: dict[tuple[int, ...], None] = field(default_factory=dict)
    with_messages: set[tuple[int, ...]] = field(default_factory=set)
    trouble: str = ""


class Hub:
    """The meeting place of one round. `standing` says for every rank which one runs in its place."""

    def __init__(self, standing: Mapping[int, int]) -> None:
        self.standing = standing
        self.running = set(standing.values())
        self.ended: dict[int, str] = {}
        self.journal = Journal()
        self._parts: dict[tuple[Any, ...], dict[int, tuple[Call, Payload]]] = defaultdict(dict)
        self._sent: dict[tuple[Any, ...], tuple[Message, Payload]] = {}
        self._received: dict[tuple[Any, ...], Message] = {}
        self._waiting: dict[int, Waiting] = {}
        self._answered: Counter[tuple[Any, int]] = Counter()
        self._kept: dict[str, bytes] = {}
        self._last: dict[tuple[Any, int], Call] = {}

    # What a rank says

    def hear(self, rank: int, words: tuple[Any, ...], reply: Reply) -> None:
        """One message of a rank."""
        kind, *rest = words
        getattr(self, f"_{kind}")(rank, *rest, reply)
        self._settle()

    def end(self, rank: int, how: str) -> None:
        """A rank is done (how: "" for well), or gone."""
        self.ended[rank] = how
        self._waiting.pop(rank, None)
        self._settle()

    def _made(self, rank: int, ranks: tuple[int, ...], reply: Reply) -> None:
        self.journal.groups.setdefault(ranks)

    def _contribute(self, rank: int, call: Call, payload: Payload, reply: Reply) -> None:
        together = self._parts["group", call.group.identity, call.number]
        for other, _ in list(together.values())[:1]:
            if not call.agrees_with(other):
                self._trouble(f"A mismatched collective: {other.words}, and {call.words}.")
        together[rank] = (call, payload)
        self._parts["role", call.group.role, call.number][rank] = (call, payload)
        self._last[call.group.identity, rank] = call

    def _collect(self, rank: int, call: Call, reply: Reply) -> None:
        """Everybody's part, by itself or by who stands for it, there in a group of the same role."""
        members, places = set(call.group.ranks), [self.standing[peer] for peer in call.group.ranks]
        here = self._parts["group", call.group.identity, call.number]
        elsewhere = self._parts["role", call.group.role, call.number]
        sources = {each: here if each in members else elsewhere for each in places}
        order = {each: number for number, each in enumerate(sources)}
        numbers = [order[each] for each in places]  # every part travels once

        def missing() -> set[int]:
            return {each for each, parts in sources.items() if each not in parts}

        def ready() -> Any:
            return None if missing() else ([sources[each][each][1] for each in sources], numbers)

        def answer(words: Answer) -> None:
            reply(words)
            self._collected(call)

        self._wait(rank, Waiting(call.words, ready, missing, answer))

    def _collected(self, call: Call) -> None:
        """Once a group has its values, those of long before are let go; who called what is kept.

        Not at once: the ranks may stand for others, whose likenesses in other groups are a few calls behind.
        """
        key = (call.group.identity, call.number)
        self._answered[key] += 1
        if self._answered[key] < len(self.running & set(call.group.ranks)):
            return
        before = call.number - _KEPT_CALLS
        for rank, (said, _) in self._parts.get(("group", call.group.identity, before), {}).items():
            for parts in (
                self._parts["group", said.group.identity, before],
                self._parts["role", said.group.role, before],
            ):
                parts[rank] = (said, None)

    def _tell(self, rank: int, message: Message, payload: Payload, reply: Reply) -> None:
        self.journal.with_messages.add(message.group.ranks)
        between = (message.source, message.target, message.number)
        here: tuple[Any, ...] = ("group", message.group.identity, *between)
        if message.is_send:
            self._sent[here] = self._sent["role", message.group.role, rank, *between] = (message, payload)
        else:
            self._received[here] = message
        if here in self._sent and here in self._received and not self._received[here].agrees_with(self._sent[here][0]):
            self._trouble(f"A mismatched message: {self._sent[here][0].words}, and {self._received[here].words}.")

    def _receive(self, rank: int, message: Message, reply: Reply) -> None:
        def found() -> tuple[Message, Payload] | None:
            between = (message.source, message.target, message.number)
            stand_in = self.standing[message.peer]
            if stand_in == message.peer:
                return self._sent.get(("group", message.group.identity, *between))
            return self._sent.get(("role", message.group.role, stand_in, *between))

        def ready() -> Any:
            sent = found()
            return None if sent is None else (sent[1],)

        def missing() -> set[int]:
            return set() if found() else {self.standing[message.peer]}

        self._wait(rank, Waiting(message.words, ready, missing, lambda answer: reply(_unpacked(answer))))

    def _keep(self, rank: int, action: str, key: str, value: Any, reply: Reply) -> None:
        """The rendezvous store. What a rank adds it adds for all whom it stands for, so that counts come out right."""
        kept = self._kept
        if action == "get":

            def missing() -> set[int]:
                return self.running - {rank}

            self._wait(
                rank, Waiting(f"rank {rank} reads {key!r} from the store", lambda: kept.get(key), missing, reply)
            )
            return
        if action == "set":
            kept[key] = value
        elif action == "delete":
            reply(("ok", kept.pop(key, None) is not None))
        elif action == "check":
            reply(("ok", key in kept))
        elif action == "add":
            share = sum(other == rank for other in self.standing.values())
            kept[key] = str(int(kept.get(key, b"0")) + value * share).encode()
            reply(("ok", int(kept[key])))

    def unmatched(self) -> str:
        """After all have ended well: a call or message whose other side never came; "" where there is none."""
        return self._unmatched_call() or self._unmatched_message()

    def _unmatched_call(self) -> str:
        furthest: dict[Any, Call] = {}
        for (identity, _), call in self._last.items():
            if identity not in furthest or call.number > furthest[identity].number:
                furthest[identity] = call
        for identity, call in furthest.items():
            for rank in sorted(set(identity[0]) & self.running):
                last = self._last.get((identity, rank))
                if last is None or last.number < call.number:
                    return f"{call.words} and waits for rank {rank}, which has ended."
        return ""

    def _unmatched_message(self) -> str:
        lonely = [m for key, m in self._received.items() if key not in self._sent]
        lonely += [m for key, (m, _) in self._sent.items() if key[0] == "group" and key not in self._received]
        for message in lonely:
            if message.peer in self.running:
                return f"{message.words}, which never {'receives' if message.is_send else 'sends'} it."
        return ""

    # Who waits

    def is_waiting(self, rank: int) -> bool:
        """Whether the rank waits for an answer."""
        return rank in self._waiting

    def _wait(self, rank: int, waiting: Waiting) -> None:
        self._waiting[rank] = waiting

    def _settle(self) -> None:
        """Answer whoever can be answered, and tell whoever waits for nothing."""
        while any(self._answer(rank) for rank in list(self._waiting)):
            pass
        live = self.running - set(self.ended)
        if self._waiting and live <= set(self._waiting):
            self._trouble(self._circle())

    def _answer(self, rank: int) -> bool:
        waiting = self._waiting.get(rank)
        if waiting is None:
            return False
        answer = waiting.ready()
        if answer is not None:
            del self._waiting[rank]
            waiting.reply(("ok", answer))
            return True
        gone = sorted(waiting.missing() & set(self.ended))
        if gone:
            self._refuse(rank, f"{waiting.words} and waits for rank {gone[0]}, which {_end(self.ended[gone[0]])}.")
        return bool(gone)

    def _refuse(self, rank: int, words: str) -> None:
        if not self.journal.trouble and not any(self.ended.values()):
            self.journal.trouble = words
        self._waiting.pop(rank).reply(("fail", words))

    def _circle(self) -> str:
        """Everybody waits: who for whom."""
        first = sorted(self._waiting)[:2]
        said = [
            f"{self._waiting[rank].words} and waits for rank {min(self._waiting[rank].missing(), default=rank)}"
            for rank in first
        ]
        return f"Nobody goes on: {'; '.join(said)}."

    def _trouble(self, words: str) -> None:
        """The run is over for everybody."""
        self.journal.trouble = self.journal.trouble or words
        for rank in list(self._waiting):
            self._waiting.pop(rank).reply(("fail", words))


def _end(how: str) -> str:
    return f"has failed ({how})" if how else "has ended"


def _unpacked(answer: Answer) -> Answer:
    kind, value = answer
    return (kind, value[0]) if kind == "ok" else answer
