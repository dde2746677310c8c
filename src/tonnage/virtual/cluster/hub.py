"""The hub passes values between running ranks and tracks which rank waits for which.

Nothing times out here. A rank gets an error as soon as it is certain that its peer never arrives: the peer has ended,
or all ranks wait. If two ranks of one group make different calls, the error names both. As new groups show which
ranks differ, more ranks join: their contributions must equal what was assumed for them before, or the round is stale.
The hub uses neither torch nor processes (see `rank`).
"""

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tonnage.virtual.cluster.exchange import Collective, Payload, SendReceive, at

_KEPT_CALLS = 64
_SAME_CALLS = "All ranks of a group must make the same calls in the same order: look for a branch that not all take."
_PAIRED = "Give every receive a send of the same size on the other rank."
_SET_KEY = "Let a rank set the key before it is read."
_LET_GO: Payload = "values of long before"
# Groups of a mesh are made one after another: rank classes are known once all are made.
_PREPARES = ("made", "part_mesh")
_STORED = (("keep", "set"), ("keep", "check"), ("keep", "get"))
_ALONE = "A call without its other side: "
Answer = tuple[str, Any]  # ("ok", value) or ("fail", words)
Reply = Callable[[Answer], None]


@dataclass
class Waiting:
    """A rank that waits for an answer."""

    words: str
    ready: Callable[[], tuple[Any] | None]  # the answer in a tuple, or None if there is none yet
    missing: Callable[[], set[int]]
    reply: Reply
    hint: str = _SAME_CALLS


@dataclass
class Journal:
    """What the ranks did together, for classifying and reporting them."""

    groups: dict[tuple[int, ...], None] = field(default_factory=dict)
    with_messages: set[tuple[int, ...]] = field(default_factory=set)
    part_meshes: list[tuple[str, int]] = field(default_factory=list)  # meshes without all ranks: words, size
    trouble: str = ""
    is_new: bool = False  # groups were made since the last check
    stale: bool = False  # a rank was answered with something that a rank which joined later would not have contributed


Widen = Callable[[Mapping[int, int], Journal], Mapping[int, int]]


class Hub:
    """The hub of one round. `standing` maps every rank to its representative.

    `widen` returns a finer mapping when new groups require one; `alike` compares what two ranks contributed.
    """

    def __init__(
        self,
        standing: Mapping[int, int],
        widen: Widen = lambda standing, journal: standing,
        alike: Callable[[Payload, Payload], bool] = operator.eq,
    ) -> None:
        self.standing = standing
        self.running = set(standing.values())
        self._widen, self._alike = widen, alike
        self._stood_in: dict[int, int] = {}  # for a rank that joined later, its earlier representative
        self.ended: dict[int, str] = {}
        self.journal = Journal()
        self._parts: dict[tuple[Any, ...], dict[int, tuple[Collective, Payload]]] = defaultdict(dict)
        self._sent: dict[tuple[Any, ...], tuple[SendReceive, Payload]] = {}
        self._received: dict[tuple[Any, ...], SendReceive] = {}
        self._sent_in_place: dict[tuple[Any, ...], Payload] = {}
        self.waiting: dict[int, Waiting] = {}
        self._answered: Counter[tuple[Any, int]] = Counter()
        self._kept: dict[str, bytes] = {}
        self._last: dict[tuple[Any, int], Collective] = {}
        self._latest: dict[int, Collective | SendReceive] = {}
        self.polled: dict[int, str] = {}  # by rank: the key that it polls

    # Messages from a rank

    def hear(self, rank: int, words: tuple[Any, ...], reply: Reply) -> None:
        """Handle one message of a rank."""
        kind, *rest = words
        self.polled.pop(rank, None)
        if kind not in _PREPARES and words[:2] not in _STORED:
            self._grow()
        getattr(self, f"_{kind}")(rank, *rest, reply)
        if kind == "tell":
            self._grow()
        self._settle()

    def end(self, rank: int, how: str) -> None:
        """Note that a rank has ended; `how` is "" for success, else the error."""
        self.ended[rank] = how
        self.waiting.pop(rank, None)
        if not how:
            self._grow()
        self._settle()

    def join(self, standing: Mapping[int, int]) -> None:
        """Let more ranks run and represent some of those that others represented."""
        for rank in set(standing.values()) - self.running:
            self._stood_in[rank] = self.standing[rank]
        self.standing, self.running = standing, set(standing.values())

    def _grow(self) -> bool:
        """Widen the mapping if there are new groups; return whether more ranks must run."""
        if not self.journal.is_new:
            return False
        self.journal.is_new = False
        before = len(self.running)
        self.join(self._widen(self.standing, self.journal))
        return len(self.running) > before

    def _made(self, rank: int, ranks: tuple[int, ...], reply: Reply) -> None:
        self.journal.is_new |= ranks not in self.journal.groups
        self.journal.groups.setdefault(ranks)

    def _part_mesh(self, rank: int, words: str, size: int, reply: Reply) -> None:
        self.journal.part_meshes.append((words, size))

    def _contribute(self, rank: int, call: Collective, payload: Payload, reply: Reply) -> None:
        together = self._parts["group", call.group.identity, call.number]
        for other, _ in list(together.values())[:1]:
            if not call.agrees_with(other):
                self._trouble(f"A mismatched collective: {other.words}, and {call.words}. {_SAME_CALLS}")
        self._latest[rank] = call
        # The round is stale if others were already answered with a different contribution for this rank.
        before = self._stood_in.get(rank)
        if before is not None and self._answered[call.group.identity, call.number]:
            given = self._parts_for(before, call).get(before)
            self.journal.stale |= given is not None and not self._alike(given[1], payload)
        # Report a peer that ended without making this call; on the card no rank would wait for it.
        for peer in self.running & set(self.ended) & set(call.group.ranks):
            last = self._last.get((call.group.identity, peer))
            if not self.ended[peer] and (last is None or last.number < call.number):
                self._trouble(self._lonely(call.words, peer, _SAME_CALLS))
                break
        together[rank] = (call, payload)
        self._parts["role", call.group.role, call.number][rank] = (call, payload)
        self._last[call.group.identity, rank] = call

    def _parts_for(self, rank: int, call: Collective) -> dict[int, tuple[Collective, Payload]]:
        """Return the parts of a call that include this rank's, from the group itself or one with the same role."""
        if rank in call.group.ranks:
            return self._parts["group", call.group.identity, call.number]
        return self._parts["role", call.group.role, call.number]

    def _collect(self, rank: int, call: Collective, reply: Reply) -> None:
        standing: Mapping[int, int] = {}
        parts: dict[int, dict[int, tuple[Collective, Payload]]] = {}  # by running rank
        places: list[int] = []

        def missing() -> set[int]:
            """Return the ranks that have not contributed yet. Called often: parts are looked up when ranks join."""
            nonlocal standing, parts, places
            if standing is not self.standing:
                standing = self.standing
                sources = [standing[peer] for peer in call.group.ranks]
                parts = {each: self._parts_for(each, call) for each in dict.fromkeys(sources)}
                order = {each: number for number, each in enumerate(parts)}
                places = [order[each] for each in sources]
            return {each for each, found in parts.items() if each not in found}

        def ready() -> tuple[Any] | None:
            if missing():
                return None
            values = [found[each][1] for each, found in parts.items()]
            self.journal.stale |= any(value is _LET_GO for value in values)
            return (([None if value is _LET_GO else value for value in values], places),)

        def answer(words: Answer) -> None:
            """Reply, and drop the values of old calls once the whole group has been answered; the calls are kept.

            Recent values stay: ranks in groups of the same role may be a few calls behind.
            """
            reply(words)
            identity, before = call.group.identity, call.number - _KEPT_CALLS
            self._answered[identity, call.number] += 1
            if self._answered[identity, call.number] < len(self.running & set(call.group.ranks)):
                return
            for rank, (said, _) in self._parts.get(("group", identity, before), {}).items():
                for where in (("group", said.group.identity, before), ("role", said.group.role, before)):
                    self._parts[where][rank] = (said, _LET_GO)

        self.waiting[rank] = Waiting(call.words, ready, missing, answer)

    def _tell(self, rank: int, message: SendReceive, payload: Payload, reply: Reply) -> None:
        self.journal.is_new |= message.group.ranks not in self.journal.with_messages
        self.journal.with_messages.add(message.group.ranks)
        self._latest[rank] = message
        between = (message.source, message.target, message.number)
        here: tuple[Any, ...] = ("group", message.group.identity, *between)
        if message.is_send:
            if here in self._sent_in_place and not self._alike(self._sent_in_place[here], payload):
                self.journal.stale = True
            self._sent[here] = self._sent["role", message.group.role, rank, *between] = (message, payload)
        else:
            self._received[here] = message
        if here in self._sent and here in self._received and not self._received[here].agrees_with(self._sent[here][0]):
            both = f"{self._sent[here][0].words}, and {self._received[here].words}"
            self._trouble(f"A mismatched message: {both}. {_PAIRED}")

    def _receive(self, rank: int, message: SendReceive, reply: Reply) -> None:
        def found() -> tuple[SendReceive, Payload] | None:
            between = (message.source, message.target, message.number)
            stand_in = self.standing[message.peer]
            if stand_in == message.peer:
                return self._sent.get(("group", message.group.identity, *between))
            return self._sent.get(("role", message.group.role, stand_in, *between))

        def ready() -> tuple[Any] | None:
            sent = found()
            if sent is not None and self.standing[message.peer] != message.peer:
                here = ("group", message.group.identity, message.source, message.target, message.number)
                self._sent_in_place[here] = sent[1]
            return sent and (sent[1],)

        def missing() -> set[int]:
            return set() if found() else {self.standing[message.peer]}

        self.waiting[rank] = Waiting(message.words, ready, missing, reply, _PAIRED)

    def _keep(self, rank: int, action: str, key: str, value: Any, reply: Reply) -> None:
        """Handle the rendezvous store. `add` counts for all ranks that this one represents, so that totals are right."""
        kept = self._kept
        if action == "get":
            words = f"rank {rank} reads {key!r} from the store{at(value or '')}"

            def missing() -> set[int]:
                """Any other running rank might still set the key."""
                others = self.running - {rank}
                return others if others <= set(self.ended) else set()

            self.waiting[rank] = Waiting(words, lambda: (kept[key],) if key in kept else None, missing, reply, _SET_KEY)
        elif action == "set":
            kept[key] = value
        elif action == "delete":
            reply(("ok", kept.pop(key, None) is not None))
        elif action == "check":
            if key not in kept:
                self.polled[rank] = f"rank {rank} asks for {key!r} in the store{at(value or '')}"
            reply(("ok", key in kept))
        elif action == "add":
            share = sum(other == rank for other in self.standing.values())
            kept[key] = str(int(kept.get(key, b"0")) + value * share).encode()
            reply(("ok", int(kept[key])))

    def unmatched(self) -> str:
        """Describe a call or message that was never matched, after all ranks ended well; "" if there is none."""
        furthest: dict[Any, Collective] = {}
        for (identity, _), call in self._last.items():
            if identity not in furthest or call.number > furthest[identity].number:
                furthest[identity] = call
        for identity, call in furthest.items():
            for rank in sorted(set(identity[0]) & self.running):
                last = self._last.get((identity, rank))
                if last is None or last.number < call.number:
                    return self._lonely(call.words, rank, _SAME_CALLS)
        lonely = [m for key, m in self._received.items() if key not in self._sent]
        lonely += [m for key, (m, _) in self._sent.items() if key[0] == "group" and key not in self._received]
        for message in lonely:
            if message.peer in self.running:
                never = "receives" if message.is_send else "sends"
                return f"{_ALONE}{message.words}, which never {never} it{self._after(message.peer)}. {_PAIRED}"
        return ""

    def _lonely(self, words: str, missing: int, hint: str) -> str:
        how = self.ended.get(missing, "")
        end = f"has failed ({how})" if how else "has ended"
        return f"{_ALONE}{words} and waits for rank {missing}, which {end}{self._after(missing)}. {hint}"

    def _after(self, rank: int) -> str:
        latest = self._latest.get(rank)
        return f" (its last call: {latest.what}{at(latest.line)})" if latest else ""

    # Waiting ranks

    def _settle(self) -> None:
        """Answer all ranks that can be answered, and report a deadlock if all wait."""
        while any(self._answer(rank) for rank in list(self.waiting)):
            pass
        live = self.running - set(self.ended)
        if self.waiting and live <= set(self.waiting) and not self._grow():
            # Deadlock: name who waits for whom.
            said, first = [], sorted(self.waiting)[:2]
            for waiting in (self.waiting[rank] for rank in first):
                missing = waiting.missing()
                for_whom = f" and waits for rank {min(missing)}" if missing else ", which nobody sets"
                said.append(waiting.words + for_whom)
            self._trouble(f"Nobody goes on: {'; '.join(said)}. {self.waiting[first[0]].hint}")

    def _answer(self, rank: int) -> bool:
        waiting = self.waiting.get(rank)
        if waiting is None:
            return False
        answer = waiting.ready()
        if answer is not None:
            del self.waiting[rank]
            waiting.reply(("ok", answer[0]))
            return True
        gone = sorted(waiting.missing() & set(self.ended))
        if gone:
            words = self._lonely(waiting.words, gone[0], waiting.hint)
            if not self.journal.trouble and not any(self.ended.values()):
                self.journal.trouble = words
            self.waiting.pop(rank).reply(("fail", words))
        return bool(gone)

    def nobody_answers(self) -> str:
        """Describe a rank that polls an unset key while all others wait; "" if some rank makes progress."""
        live = self.running - set(self.ended)
        asking = [rank for rank in sorted(live) if rank in self.polled]
        if not asking or live - set(asking) - set(self.waiting):
            return ""
        return f"{_ALONE}{self.polled[asking[0]]} again and again, and nobody sets it. {_SET_KEY}"

    def _trouble(self, words: str) -> None:
        self.journal.trouble = self.journal.trouble or words
        for rank in list(self.waiting):
            self.waiting.pop(rank).reply(("fail", words))
