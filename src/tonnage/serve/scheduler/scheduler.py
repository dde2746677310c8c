"""The scheduler: a state machine over sequences and blocks. It knows no torch, no text and no time but the given clock.

`schedule` is called one step ahead: its step is launched while the previous one is still in flight, and `complete`
follows when tokens are known. So sequences advance when they are scheduled, and what arrives late is handled late: a row
computed for a sequence that had ended is ignored.

    waiting ──admit──▶ running ──end, stop, abort, error──▶ finished
    ▲ ▲                │
    │ └────preempt─────┤  recomputed
    └─ swapped ◀───────┘  or kept on the host

Safety: a block is shared or published only once the step that wrote it is complete; a sequence returns only once
nothing of it is in flight; only full blocks are shared, so no block with two holders is ever written.

Liveness: the oldest running sequence can preempt all others, or wait until those that end have ended; and every
accepted sequence fits the pool alone.
"""

import sys
from bisect import bisect_left, insort
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from collections.abc import Sequence as Sized
from itertools import compress

from tonnage.serve.cache.block_pool import BlockPool, OutOfBlocks
from tonnage.serve.cache.block_tables import ROOM_TO_GROW, BlockTables
from tonnage.serve.config import EngineConfig
from tonnage.serve.sampling import FinishReason
from tonnage.serve.scheduler.queue import RANK, FinishRate, NeverFits, Queue, QueueFull
from tonnage.serve.scheduler.sequence import (
    NOT_DECODING,
    Clock,
    Decode,
    DecodeClock,
    ScheduledStep,
    ScheduledTokens,
    Sequence,
    Status,
)

# Every this many steps, blocks are allocated for as many steps ahead. The device learns of new blocks only then; on
# average a sequence holds half as many tokens more than it needs.
AHEAD = 4
FINISHED = Status.FINISHED
RUNNING = Status.RUNNING


class Scheduler:
    """Turns sequences into steps. `context` is the longest sequence; `host_blocks` above 0 enables swapping."""

    def __init__(
        self, pool: BlockPool, config: EngineConfig, clock: Clock, *, context: int = sys.maxsize, host_blocks: int = 0
    ) -> None:
        self.pool, self.config, self.clock, self._context = pool, config, clock, context
        self.tables = BlockTables(pool, host_blocks)
        self.host_pool, self.counters = self.tables.host_pool, self.tables.counters
        self.waiting = Queue()
        self._decoding: list[Sequence] = []  # sorted by rank
        self._works: list[Decode] = []  # one per decoding sequence
        self._decode_clock = DecodeClock()  # shared by these
        self._awaited: defaultdict[int, list[Sequence]] = defaultdict(list)  # by the step in which they need a block
        self._decodes: tuple[Decode, ...] = ()  # all of them, while unchanged
        self._answers: tuple[list[int], ...] = ()  # the lists that their tokens are appended to
        self._changed = False  # since then
        self._filling: list[Sequence] = []  # with tokens to compute before sampling
        self._ending: list[Sequence] = []  # with their last token in flight
        self._stops: Counter[int] = Counter()  # of all sequences that have run and are not finished
        self._slots = list(range(config.max_seqs - 1, -1, -1))
        self._flights: dict[int, ScheduledStep] = {}  # in launch order
        self._finish_rate = FinishRate()
        self._next_rank = 0
        self._next_number = 0

    @property
    def running(self) -> list[Sequence]:
        """Sequences that hold blocks and a slot."""
        return self._decoding + self._filling + self._ending

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self._decoding or self._filling or self._ending or len(self.waiting))

    # Adding and ending.

    def add(self, *sequences: Sequence) -> None:
        """Accept all of these, or none. The samples of one prompt belong together, the parent first."""
        for sequence in sequences:
            self._prepare(sequence)
        if len(sequences) > self.config.max_waiting:
            problem = f"{len(sequences)} answers to one prompt; the queue takes {self.config.max_waiting}."
            raise NeverFits(problem, hint=f"Ask for {self.config.max_waiting} at most.")
        if self.waiting.fresh + len(sequences) > self.config.max_waiting:
            retry_after_s = self._finish_rate.retry_after_s(len(self.waiting))
            raise QueueFull(f"{len(self.waiting)} sequences wait already.", retry_after_s=retry_after_s)
        for sequence in sequences:
            parent = sequence.parent
            aside = parent is not None and (parent in self.waiting or parent in self._filling or parent.busy > 0)
            self.waiting.add(sequence, aside=aside)

    def abort(self, sequence: Sequence, reason: FinishReason = "abort") -> bool:
        """End a sequence in any state, also with "stop" for a stop string. False if it had ended or was never added."""
        if sequence.status is FINISHED or (sequence.slot < 0 and sequence not in self.waiting):
            return False
        self._finish(sequence, reason)
        return True

    def _prepare(self, sequence: Sequence) -> None:
        """Refuse what can never run; set the length at which it ends."""
        context, sampling, size = self._context, sequence.sampling, self.pool.size
        prompt, usable = sequence.prompt_length, self.pool.count - 1
        assert sequence.status is Status.WAITING and sequence not in self.waiting and prompt == len(sequence.tokens)
        if prompt == 0:
            raise NeverFits("The prompt has no tokens.", hint="Give at least one.")
        if prompt >= context:
            problem = f"The prompt has {prompt} tokens; the context is {context}."
            raise NeverFits(problem, hint=f"Shorten it to {context - 1} tokens.")
        end = min(prompt + sampling.max_tokens, context)
        if -(-(end - 1) // size) > usable:
            raise NeverFits(
                f"{prompt} tokens of prompt and {end - prompt} to generate; the whole cache holds {usable * size}.",
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
        self._finish_rate.note(self.clock())
        sequence.history.pack()

    def _leave(self, sequence: Sequence) -> None:
        """Remove a sequence from those running; publish its blocks and free its slot."""
        self.tables.publish(sequence)
        if sequence.clock is self._decode_clock:
            self._forget_next_block(sequence)
            self._stand_still(sequence)
        else:
            (self._filling if sequence in self._filling else self._ending).remove(sequence)
        self._slots.append(sequence.slot)
        sequence.slot = -1

    # Scheduling.

    def schedule(self) -> ScheduledStep | None:
        """Return the next step, to be launched at once; None if nothing can run before a step in flight completes."""
        step = ScheduledStep(self._next_number, budget=self.config.batched_tokens)
        self._decode(step)
        for sequence in self._filling[:]:
            if step.budget:
                self._chunk(sequence, step)
        if not step.preempted:
            self._admit(step)
        if not step.decodes and not step.chunks:
            # Nothing needed the room after all, so no step will copy the blocks.
            for sequence in step.swapped:
                self.tables.forget_swap(sequence)
            return None
        self._next_number += 1
        self._flights[step.number] = step
        return step

    def _decode(self, step: ScheduledStep) -> None:
        """Schedule one more token for each decoding sequence, oldest first; only those that need a block are visited."""
        clock = self._decode_clock
        held = dict.fromkeys(self._decoding[step.budget :])
        due = sorted(self._awaited.pop(clock.steps, ()), key=RANK)
        for sequence in due if not held and self._have_room(due, step) else self._make_room(due, held, step):
            if sequence.computed < sequence.end - 2:
                self._await_next_block(sequence)
            else:
                step.ending.append(sequence)
        if clock.steps % AHEAD == 0 and not held:
            # Allocate blocks for the next steps at once while there is plenty of room.
            steps = range(clock.steps + 1, clock.steps + AHEAD)
            soon = [sequence for number in steps for sequence in self._awaited.get(number, ())]
            if self.pool.available >= len(soon) + ROOM_TO_GROW * len(self._decoding) and self._have_room(soon, step):
                for number in steps:
                    self._awaited.pop(number, None)
                for sequence in soon:
                    self._await_next_block(sequence)
        clock.steps += 1
        for sequence in held:
            self._hold(sequence)
        if self._changed:
            self._decodes, self._changed = tuple(self._works), False
            self._answers = tuple([sequence.tokens for sequence in self._decoding])
        step.decodes = tuple(one for one in self._decodes if one.sequence not in held) if held else self._decodes
        step.budget -= len(step.decodes)
        for sequence in step.ending:
            self._stand_still(sequence)
        self._ending += step.ending

    def _stand_still(self, sequence: Sequence) -> None:
        """Stop decoding a sequence."""
        index = bisect_left(self._decoding, sequence.rank, key=RANK)
        del self._decoding[index], self._works[index]
        self._changed = True
        if not self._decoding:
            self._decodes, self._answers = (), ()  # an idle engine references no sequence
        sequence.join(NOT_DECODING)

    def _hold(self, sequence: Sequence) -> None:
        """Skip a decoding sequence in this step."""
        if sequence.status is RUNNING:
            self._forget_next_block(sequence)
            sequence.clock_offset -= 1
            self._await_next_block(sequence)

    def _await_next_block(self, sequence: Sequence) -> None:
        self._awaited[sequence.next_block_at - sequence.clock_offset].append(sequence)

    def _forget_next_block(self, sequence: Sequence) -> None:
        """Remove it from those awaiting a block; those due in this step are already out."""
        due = self._awaited.get(sequence.next_block_at - sequence.clock_offset, [])
        if sequence in due:
            due.remove(sequence)

    def _have_room(self, sequences: list[Sequence], step: ScheduledStep) -> bool:
        """Give each a block if it needs one, if there are enough for all."""
        try:
            self.tables.grow(sequences, step)
        except OutOfBlocks:
            return False
        return True

    def _make_room(self, due: list[Sequence], held: dict[Sequence, None], step: ScheduledStep) -> Iterator[Sequence]:
        """Yield sequences that get a block, preempting newer ones if needed; the others are held."""
        for sequence in due:
            if sequence.status is not RUNNING:
                continue  # an older one took its room
            if sequence not in held:
                while not self._have_room([sequence], step):
                    if not self._preempt_newer(sequence, step):
                        held[sequence] = None
                        break
                else:
                    yield sequence

    def _chunk(self, sequence: Sequence, step: ScheduledStep) -> None:
        """Schedule as many of its known tokens as the budget allows; the last one samples."""
        start, known = sequence.computed, len(sequence.tokens)
        end = min(known, start + step.budget)
        step.chunks.append(ScheduledTokens(sequence, start, end - start, end == known))
        step.budget -= end - start
        sequence.computed = end
        sequence.busy += 1
        if end == known:
            self._filling.remove(sequence)
            if sequence.end - end == 1:
                self._ending.append(sequence)
                return
            # It decodes from the next step on.
            index = bisect_left(self._decoding, sequence.rank, key=RANK)
            self._decoding.insert(index, sequence)
            self._works.insert(index, Decode(sequence))
            self._changed = True
            sequence.join(self._decode_clock)
            self._await_next_block(sequence)

    def _admit(self, step: ScheduledStep) -> None:
        """Admit sequences in queue order, while there are tokens, slots and blocks for the first."""
        published = False
        while step.budget and self._slots:
            sequence = self.waiting.first()
            running = len(self._decoding) + len(self._filling)
            if sequence is None or sequence.in_flight or sequence.busy or self.tables.refuse_still(sequence, running):
                return
            if not published:
                # Publish complete blocks for newcomers, only now that there is one.
                for one in self.running:
                    self.tables.publish(one)
                published = True
            if not self.tables.give(sequence, step, running):
                return
            self.waiting.pop()
            if sequence.rank < 0:
                sequence.rank, sequence.admitted_s = self._next_rank, self.clock()
                self._next_rank += 1
                self._stops.update(sequence.stops)
            sequence.status, sequence.slot = RUNNING, self._slots.pop()
            insort(self._filling, sequence, key=RANK)
            self._chunk(sequence, step)

    def _preempt_newer(self, sequence: Sequence, step: ScheduledStep) -> bool:
        """Preempt the newest running sequence; return False if that is the sequence itself."""
        victim = max((group[-1] for group in (self._decoding, self._filling) if group), key=RANK)
        if victim is sequence:
            return False
        self._leave(victim)
        victim.status = Status.WAITING
        if not self.tables.swap_out(victim, step):
            self.tables.release(victim)
        self.waiting.put_back(victim)
        victim.preemptions += 1
        self.counters.preemptions += 1
        step.preempted = True
        return True

    # Completing.

    def complete(self, step: ScheduledStep, tokens: list[int]) -> list[Sequence]:
        """Take a step's tokens, once and in launch order; return the sequences that this finished."""
        if step.number not in self._flights or step.sampled is not None:
            return []
        assert len(tokens) == len(step.decodes) + sum(work.samples for work in step.chunks)
        step.sampled = tokens
        return self._land()

    def fail(self, step: ScheduledStep) -> list[Sequence]:
        """End the sequences of a step that raised with an error; all others continue."""
        if self._flights.pop(step.number, None) is None:
            return []
        for sequence in step.swapped:
            self.tables.forget_swap(sequence)
        failed = [work.sequence for work in step.works if work.sequence.status is not FINISHED]
        for sequence in failed:
            self._finish(sequence, "error")
        return failed + self._land()

    def _land(self) -> list[Sequence]:
        """Process every step whose tokens have arrived, in launch order."""
        finished: list[Sequence] = []
        while self._flights:
            number, step = next(iter(self._flights.items()))
            if step.sampled is None:
                break
            del self._flights[number]
            # Decodes: a token each.
            decodes: Sized[Decode] = step.decodes
            tokens, sampled = step.sampled, iter(step.sampled[len(decodes) :])
            if not step.plain:
                here = [work.sequence.status is not FINISHED for work in decodes]
                decodes, tokens = list(compress(decodes, here)), list(compress(tokens, here))
            answers = self._answers if decodes is self._decodes else [work.sequence.tokens for work in decodes]
            deque(map(list.append, answers, tokens), maxlen=0)
            if self._stops and not self._stops.keys().isdisjoint(tokens):
                news = zip(decodes, tokens, strict=False)
                self._end([work.sequence for work, token in news if token in work.sequence.stops], "stop", finished)
            self._end(step.ending, "length", finished)
            # Chunks: blocks to publish, and a token after the last of a prompt.
            for chunk in step.chunks:
                sequence, token = chunk.sequence, next(sampled) if chunk.samples else None
                if sequence.status is FINISHED:
                    continue
                sequence.busy -= 1
                self.tables.publish(sequence, chunk.start + chunk.count)
                if token is None:
                    continue
                sequence.tokens.append(token)
                if token in sequence.stops:
                    self._end([sequence], "stop", finished)
                elif len(sequence.tokens) >= sequence.end:
                    self._end([sequence], "length", finished)
                self.waiting.call(sequence)
            for sequence in step.swapped:
                sequence.busy -= sequence.status is not FINISHED
        return finished

    def _end(self, sequences: list[Sequence], reason: FinishReason, finished: list[Sequence]) -> None:
        for sequence in sequences:
            if sequence.status is not FINISHED:
                self._finish(sequence, reason)
                finished.append(sequence)
