"""What runs next: a state machine over sequences and blocks. It knows no torch, no text and no time but the given clock.

`schedule` is called one step ahead: the step that it returns is launched while the one before is still in flight, and
`complete` follows when tokens are known. So sequences advance when they are scheduled, and what the host learns late is
undone late: a row computed for a sequence that had ended is dropped.

    waiting ──admit──▶ running ──end, stop, abort, error──▶ finished
       ▲ ▲                │
       │ └────preempt─────┤  computed again
       └─ swapped ◀───────┘  or kept on the host

What makes it safe: a block is shared or published only once the step that wrote it is complete; a sequence comes back only
once nothing of it is in flight; only full blocks are shared, so no block with two holders is ever written.
What makes it live: the oldest running sequence can preempt all others, or wait until those that end have ended; and whatever is
accepted fits the pool alone.
"""

from bisect import bisect_left, insort
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from collections.abc import Sequence as Sized
from dataclasses import dataclass
from itertools import compress

from tonnage.serve.admission import RANK, NeverFits, Pace, Queue, QueueFull
from tonnage.serve.blocks import BlockPool, OutOfBlocks
from tonnage.serve.sampling import FinishReason
from tonnage.serve.sequence import STILL, Clock, Decode, Rounds, Sequence, Status, Step, Work
from tonnage.serve.tables import ROOM_TO_GROW, Counters, Draft, Tables

__all__ = ["Counters", "Limits", "NeverFits", "QueueFull", "Scheduler"]

# In every so many rounds, blocks are taken for as many. The device is told of new blocks then, and goes on alone until the
# next time; a sequence holds half as many tokens more than it needs.
AHEAD = 4
FINISHED = Status.FINISHED
RUNNING = Status.RUNNING


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """On what runs at once, what waits, and how long a sequence may get. `host_blocks` above 0 allow swapping."""

    max_seqs: int = 256
    batched_tokens: int = 8192
    max_waiting: int = 1024
    context: int = 32768
    host_blocks: int = 0


@dataclass(slots=True)
class _Flight:
    """A step that was launched."""

    step: Step
    swapped: list[Sequence]
    ending: list[Sequence]  # of its decodes, those that draw their last token
    tokens: list[int] | None = None  # if they came before those of an earlier step
    plain: bool = True  # nobody who draws in it has ended since


class Scheduler:
    """Sequences in, steps out, tokens in."""

    def __init__(self, pool: BlockPool, limits: Limits, clock: Clock) -> None:
        self.pool, self.limits, self.clock = pool, limits, clock
        self.tables = Tables(pool, limits.host_blocks)
        self.host_pool, self.counters = self.tables.host_pool, self.tables.counters
        self.waiting = Queue()
        self._decoding: list[Sequence] = []  # by rank, as the next
        self._works: list[Decode] = []  # of these
        self._rounds = Rounds()  # of these, too
        self._due: defaultdict[int, list[Sequence]] = defaultdict(list)  # by the round in which they reach their edge
        self._decodes: tuple[Decode, ...] = ()  # all of them, as long as they are the same
        self._answers: tuple[list[int], ...] = ()  # the lists that their tokens go to
        self._changed = False  # since then
        self._filling: list[Sequence] = []  # with tokens to compute before one can be drawn
        self._ending: list[Sequence] = []  # with their last token in flight
        self._stops: Counter[int] = Counter()  # of all that have run and are not finished
        self._slots = list(range(limits.max_seqs - 1, -1, -1))
        self._flights: dict[int, _Flight] = {}  # in the order of launch
        self._pace = Pace()
        self._next_rank = 0
        self._next_number = 0

    @property
    def running(self) -> list[Sequence]:
        """Sequences that hold blocks and a slot."""
        return self._decoding + self._filling + self._ending

    @property
    def has_work(self) -> bool:
        """Whether any sequence is not finished."""
        return bool(self._decoding or self._filling or self._ending or len(self.waiting))

    # Coming and going.

    def add(self, *sequences: Sequence) -> None:
        """Accept all of these, or none. The draws of one prompt belong together, the parent first."""
        for sequence in sequences:
            self._prepare(sequence)
        if len(sequences) > self.limits.max_waiting:
            raise NeverFits(
                f"{len(sequences)} draws of one prompt; the queue takes {self.limits.max_waiting}.",
                hint=f"Ask for {self.limits.max_waiting} at most.",
            )
        if self.waiting.fresh + len(sequences) > self.limits.max_waiting:
            retry_after_s = self._pace.retry_after_s(len(self.waiting))
            raise QueueFull(f"{len(self.waiting)} sequences wait already.", retry_after_s=retry_after_s)
        for sequence in sequences:
            parent = sequence.parent
            aside = parent is not None and (parent in self.waiting or parent in self._filling or parent.busy > 0)
            self.waiting.add(sequence, aside=aside)

    def abort(self, sequence: Sequence, reason: FinishReason = "abort") -> bool:
        """End a sequence in whatever state; False where it had ended, or was never added."""
        if sequence.status is FINISHED or (sequence.slot < 0 and sequence not in self.waiting):
            return False
        self._finish(sequence, reason)
        return True

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence for a reason that lies outside, such as a stop string. Harmless where it had ended."""
        self.abort(sequence, reason)

    def _prepare(self, sequence: Sequence) -> None:
        """Refuse what can never run; note when it ends."""
        limits, sampling, size = self.limits, sequence.sampling, self.pool.size
        prompt, usable = sequence.prompt_length, self.pool.count - 1
        assert sequence.status is Status.WAITING and sequence not in self.waiting and prompt == len(sequence.tokens)
        if prompt == 0:
            raise NeverFits("The prompt has no tokens.", hint="Give at least one.")
        if prompt >= limits.context:
            raise NeverFits(
                f"The prompt has {prompt} tokens; the context is {limits.context}.",
                hint=f"Shorten it to {limits.context - 1} tokens.",
            )
        end = min(prompt + sampling.max_tokens, limits.context)
        if -(-(end - 1) // size) > usable:
            raise NeverFits(
                f"{prompt} tokens of prompt and {end - prompt} to draw; the whole cache holds {usable * size}.",
                hint=f"Ask for {usable * size + 1} tokens at most, the prompt included.",
            )
        sequence.end = end
        sequence.stops = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else sequence.eos_ids)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.status is RUNNING:
            self._leave(sequence)
        else:
            self.waiting.remove(sequence)
        self.tables.release(sequence)
        if sequence.rank >= 0:
            self._stops -= Counter(sequence.stops)
        sequence.status, sequence.finish_reason = FINISHED, reason
        self.counters.finished += 1
        if sequence.in_flight:
            for flight in self._flights.values():
                flight.plain = False
        sequence.computed, sequence.busy = min(sequence.computed, len(sequence.tokens) - 1), 0
        self.waiting.call(sequence)
        self._pace.note(self.clock())
        sequence.text.pack()

    def _leave(self, sequence: Sequence) -> None:
        """No longer among those that run; its slot is free, and others may use what it has computed."""
        self.tables.publish(sequence)
        if sequence.rounds is self._rounds:
            self._forget_edge(sequence)
            self._stand_still(sequence)
        else:
            (self._filling if sequence in self._filling else self._ending).remove(sequence)
        self._slots.append(sequence.slot)
        sequence.slot = -1

    # A step.

    def schedule(self) -> Step | None:
        """The next step, to be launched at once; None where nothing can run before a step in flight is complete."""
        draft = Draft(self.limits.batched_tokens)
        self._decode(draft)
        for sequence in self._filling[:]:
            if draft.budget:
                self._chunk(sequence, draft)
        if not draft.preempted:
            self._admit(draft)
        if not draft.decodes and not draft.chunks:
            # Nobody needed the room after all, so nobody will copy the blocks.
            for sequence in draft.swapped:
                self.tables.forget_swap(sequence)
            return None
        step = Step(
            self._next_number,
            draft.decodes,
            tuple(draft.chunks),
            tuple(draft.copies),
            tuple(draft.swaps_out),
            tuple(draft.swaps_in),
            tuple(draft.grown),
        )
        self._next_number += 1
        self._flights[step.number] = _Flight(step, draft.swapped, draft.ending)
        return step

    def _decode(self, draft: Draft) -> None:
        """One token more for each that can, the oldest first to get room. Only those at their edge are looked at."""
        held = dict.fromkeys(self._decoding[draft.budget :])
        due = sorted(self._due.pop(self._rounds.count, ()), key=RANK)
        for sequence in due if not held and self._have_room(due, draft) else self._make_room(due, held, draft):
            if sequence.computed < sequence.end - 2:
                self._note_edge(sequence)
            else:
                draft.ending.append(sequence)
        if self._rounds.count % AHEAD == 0 and not held:
            self._look_ahead(draft)
        self._rounds.count += 1
        for sequence in held:
            self._hold(sequence)
        if self._changed:
            self._decodes, self._changed = tuple(self._works), False
            self._answers = tuple([sequence.tokens for sequence in self._decoding])
        draft.decodes = tuple(one for one in self._decodes if one.sequence not in held) if held else self._decodes
        draft.budget -= len(draft.decodes)
        for sequence in draft.ending:
            self._stand_still(sequence)
        self._ending += draft.ending

    def _look_ahead(self, draft: Draft) -> None:
        """While there is plenty of room: at once the blocks that are needed in the next rounds, and then none in those."""
        rounds = range(self._rounds.count + 1, self._rounds.count + AHEAD)
        soon = [sequence for number in rounds for sequence in self._due.get(number, ())]
        if self.pool.available >= len(soon) + ROOM_TO_GROW * len(self._decoding) and self._have_room(soon, draft):
            for number in rounds:
                self._due.pop(number, None)
            for sequence in soon:
                self._note_edge(sequence)

    def _advance_with_others(self, sequence: Sequence) -> None:
        """It decodes from the next step on."""
        index = bisect_left(self._decoding, sequence.rank, key=RANK)
        self._decoding.insert(index, sequence)
        self._works.insert(index, Decode(sequence))
        self._changed = True
        sequence.join(self._rounds)
        self._note_edge(sequence)

    def _stand_still(self, sequence: Sequence) -> None:
        """It decodes no longer."""
        index = bisect_left(self._decoding, sequence.rank, key=RANK)
        del self._decoding[index], self._works[index]
        self._changed = True
        if not self._decoding:
            self._decodes, self._answers = (), ()  # an idle engine holds on to nobody
        sequence.join(STILL)

    def _hold(self, sequence: Sequence) -> None:
        """It does not advance in this round."""
        if sequence.status is RUNNING:
            self._forget_edge(sequence)
            sequence.lead -= 1
            self._note_edge(sequence)

    def _note_edge(self, sequence: Sequence) -> None:
        self._due[sequence.edge - sequence.lead].append(sequence)

    def _forget_edge(self, sequence: Sequence) -> None:
        """Those whose round it is have been taken out already."""
        due = self._due.get(sequence.edge - sequence.lead, [])
        if sequence in due:
            due.remove(sequence)

    def _have_room(self, sequences: list[Sequence], draft: Draft) -> bool:
        """Give all of them room at their edges, if there is enough for all."""
        try:
            self.tables.grow(sequences, draft)
        except OutOfBlocks:
            return False
        return True

    def _make_room(self, due: list[Sequence], held: dict[Sequence, None], draft: Draft) -> Iterator[Sequence]:
        """Those for whom there is room, if need be that of newer sequences; the others are held."""
        for sequence in due:
            if sequence.status is not RUNNING:
                continue  # an older one took its room
            if sequence in held or not self._grow(sequence, draft):
                held[sequence] = None
            else:
                yield sequence

    def _grow(self, sequence: Sequence, draft: Draft) -> bool:
        """Room for one token more, if need be that of a newer sequence; False where it may not go on in this step."""
        while not self._have_room([sequence], draft):
            if not self._preempt_newer(sequence, draft):
                return False
        return True

    def _chunk(self, sequence: Sequence, draft: Draft) -> None:
        """As many of its known tokens as the budget allows; the last one draws."""
        start, known = sequence.computed, len(sequence.tokens)
        end = min(known, start + draft.budget)
        draft.chunks.append(Work(sequence, start, end - start, end == known))
        draft.budget -= end - start
        sequence.computed = end
        sequence.busy += 1
        if end == known:
            self._filling.remove(sequence)
            if sequence.end - end == 1:
                self._ending.append(sequence)
            else:
                self._advance_with_others(sequence)

    def _admit(self, draft: Draft) -> None:
        """Sequences in the order of the queue, while there are tokens, slots and blocks for the first of them."""
        published = False
        while draft.budget and self._slots:
            sequence = self.waiting.first()
            running = len(self._decoding) + len(self._filling)
            if sequence is None or sequence.in_flight or sequence.busy or self.tables.refuse_still(sequence, running):
                return
            if not published:
                # Who comes may use what is complete; as long as nobody does, it need not be said.
                for one in self.running:
                    self.tables.publish(one)
                published = True
            if not self.tables.give(sequence, draft, running):
                return
            self.waiting.pop()
            if sequence.rank < 0:
                sequence.rank, sequence.admitted_s = self._next_rank, self.clock()
                self._next_rank += 1
                self._stops.update(sequence.stops)
            sequence.status, sequence.slot = RUNNING, self._slots.pop()
            insort(self._filling, sequence, key=RANK)
            self._chunk(sequence, draft)

    def _preempt_newer(self, sequence: Sequence, draft: Draft) -> bool:
        """The newest of those that run makes room; False where that is the sequence itself."""
        victim = max((group[-1] for group in (self._decoding, self._filling) if group), key=RANK)
        if victim is sequence:
            return False
        self._leave(victim)
        victim.status = Status.WAITING
        if not self.tables.swap_out(victim, draft):
            self.tables.release(victim)
        self.waiting.put_back(victim)
        victim.preemptions += 1
        self.counters.preemptions += 1
        draft.preempted = True
        return True

    # Back from a step.

    def complete(self, step: Step, tokens: list[int]) -> list[Sequence]:
        """Take the tokens of a step, one for each of its samplers; those that it finished.

        A step that is complete already is passed over; one that comes before an earlier one waits for that.
        """
        flight = self._flights.get(step.number)
        if flight is None or flight.tokens is not None:
            return []
        assert len(tokens) == len(step.decodes) + sum(work.samples for work in step.chunks)
        flight.tokens = tokens
        return self._land()

    def fail(self, step: Step) -> list[Sequence]:
        """A step that raised: its own sequences end with an error, all others go on."""
        flight = self._flights.pop(step.number, None)
        if flight is None:
            return []
        for sequence in flight.swapped:
            self.tables.forget_swap(sequence)
        failed = [work.sequence for work in step.works if work.sequence.status is not FINISHED]
        for sequence in failed:
            self._finish(sequence, "error")
        return failed + self._land()

    def _land(self) -> list[Sequence]:
        """Every step whose tokens are there, as long as none before it is missing."""
        finished: list[Sequence] = []
        while self._flights:
            number, flight = next(iter(self._flights.items()))
            if flight.tokens is None:
                break
            del self._flights[number]
            self._learn_decodes(flight, flight.tokens, finished)
            self._learn_chunks(flight.step, flight.tokens, finished)
            for sequence in flight.swapped:
                sequence.busy -= sequence.status is not FINISHED
        return finished

    def _learn_decodes(self, flight: _Flight, tokens: list[int], finished: list[Sequence]) -> None:
        decodes: Sized[Decode] = flight.step.decodes
        if not flight.plain:
            here = [work.sequence.status is not FINISHED for work in decodes]
            decodes, tokens = list(compress(decodes, here)), list(compress(tokens, here))
        answers = self._answers if decodes is self._decodes else [work.sequence.tokens for work in decodes]
        deque(map(list.append, answers, tokens), maxlen=0)
        if self._stops and not self._stops.keys().isdisjoint(tokens):
            news = zip(decodes, tokens, strict=False)
            self._end([work.sequence for work, token in news if token in work.sequence.stops], "stop", finished)
        self._end(flight.ending, "length", finished)

    def _end(self, sequences: list[Sequence], reason: FinishReason, finished: list[Sequence]) -> None:
        for sequence in sequences:
            if sequence.status is not FINISHED:
                self._finish(sequence, reason)
                finished.append(sequence)

    def _learn_chunks(self, step: Step, tokens: list[int], finished: list[Sequence]) -> None:
        drawn = iter(tokens[len(step.decodes) :])
        for work in step.chunks:
            sequence, token = work.sequence, next(drawn) if work.samples else None
            if sequence.status is FINISHED:
                continue
            sequence.busy -= 1
            self.tables.publish(sequence, work.start + work.count)
            if token is None:
                continue
            if len(sequence.tokens) == sequence.prompt_length:
                sequence.first_token_s = self.clock()
            self._learn(sequence, token, finished)
            self.waiting.call(sequence)

    def _learn(self, sequence: Sequence, token: int, finished: list[Sequence]) -> None:
        if sequence.status is FINISHED:
            return
        sequence.tokens.append(token)
        stopped = token in sequence.stops
        if stopped or len(sequence.tokens) >= sequence.end:
            self._finish(sequence, "stop" if stopped else "length")
            finished.append(sequence)
