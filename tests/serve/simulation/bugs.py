"""Mistakes on purpose, such as people make in code like this; the simulation must catch every one of them.

A bug is one part with a method that is wrong; its docstring says how. The simulation changes the class of that part.
"""

from collections.abc import Sequence as Sized

from serve.simulation.pool import WatchedPool
from serve.simulation.run import SeedFailed, play
from tonnage.serve.cache.block_pool import PrefixId, TokenHistory
from tonnage.serve.cache.block_tables import BlockTables
from tonnage.serve.sampling import FinishReason
from tonnage.serve.scheduler.queue import RANK, FinishRate, Queue, QueueFull
from tonnage.serve.scheduler.scheduler import Scheduler
from tonnage.serve.scheduler.sequence import ScheduledStep, Sequence, Status

# Blocks.


class ForgetsTheSalt(WatchedPool):
    """A prefix is found whoever's it is."""

    def publish(self, block: int, parent: PrefixId, history: TokenHistory, start: int = 0) -> PrefixId:
        return super().publish(block, "" if isinstance(parent, str) else parent, history, start)

    def match(self, tokens: list[int], salt: str, most: int | None = None) -> tuple[list[int], list[PrefixId]]:
        return super().match(tokens, "", most)


class TrustsTheHash(WatchedPool):
    """A block is found by a hash of its tokens, which are not compared; here the hash is weak."""

    def publish(self, block: int, parent: PrefixId, history: TokenHistory, start: int = 0) -> PrefixId:
        return super().publish(block, parent, TokenHistory(self._weak(history.part(start, start + self.size))))

    def match(self, tokens: list[int], salt: str, most: int | None = None) -> tuple[list[int], list[PrefixId]]:
        most = len(tokens) // self.size if most is None else most
        pieces = (tokens[first : first + self.size] for first in range(0, most * self.size, self.size))
        return super().match([token for piece in pieces for token in self._weak(piece)], salt, most)

    def _weak(self, tokens: list[int]) -> list[int]:
        return [sum(tokens)] + [0] * (self.size - 1)


class ForgetsTheChain(WatchedPool):
    """A block is found by its own tokens, whatever came before them."""

    def publish(self, block: int, parent: PrefixId, history: TokenHistory, start: int = 0) -> PrefixId:
        super().publish(block, "", history, start)
        return ""

    def match(self, tokens: list[int], salt: str, most: int | None = None) -> tuple[list[int], list[PrefixId]]:
        blocks: list[int] = []
        for first in range(0, (len(tokens) // self.size if most is None else most) * self.size, self.size):
            found, _ = super().match(tokens[first : first + self.size], "", 1)
            if not found:
                break
            blocks += found
        return blocks, [""] * len(blocks)


class PacksTheWrongTokens(Scheduler):
    """Of a sequence that ended, the prefix cache keeps what it would have said had it gone on."""

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.history._tokens = [token + 1 for token in sequence.history._tokens]
        super()._finish(sequence, reason)


class EvictsWithoutForgetting(WatchedPool):
    """A block that is taken for new tokens can still be found by its old ones."""

    def take(self, number: int) -> list[int]:
        found = dict(self._found)
        blocks = super().take(number)
        self._found = found
        return blocks


class FreesTheSharedBlock(WatchedPool):
    """The first who releases a block frees it, whoever else holds it."""

    def release(self, blocks: Sized[int]) -> None:
        for block in blocks:
            while self.references(block) > 1:
                super().release([block])
        super().release(blocks)


class TakesCachedBlocksFirst(WatchedPool):
    """The block that was released last is taken first, though it is cached and others are free."""

    def release(self, blocks: Sized[int]) -> None:
        super().release(blocks)
        for block in blocks:
            if self.references(block) == 0:
                self._unlink(block)
                first = self._after[0]
                self._before[block], self._after[block] = 0, first
                self._after[0] = self._before[first] = block
                self.available += 1


# Coming and going.


class KeepsBlocksOfTheAborted(Scheduler):
    """A client that is gone leaves its blocks behind."""

    def abort(self, sequence: Sequence, reason: FinishReason = "abort") -> bool:
        if reason == "abort":
            sequence.blocks = []
        return super().abort(sequence, reason)


class KeepsHostBlocksOfTheAborted(Scheduler):
    """A sequence that ends while it is swapped out leaves its blocks on the host."""

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.host_blocks = []
        super()._finish(sequence, reason)


class ReleasesTwice(Scheduler):
    """The blocks of a sequence that ends are released once more: somebody else's, where they are shared."""

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        again = [block for block in sequence.blocks if self.pool.references(block) > 1]
        super()._finish(sequence, reason)
        self.pool.release(again)


class AcceptsAnyNumber(Scheduler):
    """The queue has no bound."""

    def add(self, *sequences: Sequence) -> None:
        try:
            super().add(*sequences)
        except QueueFull:
            for sequence in sequences:
                self.waiting.add(sequence)


class TrustsTheClock(FinishRate):
    """When to come back is reckoned from the clock, wherever it has jumped."""

    def retry_after_s(self, waiting: int) -> float:
        passed_s = self._times_s[-1] - self._times_s[0] if self._times_s else 0.0
        return 1.0 + passed_s * waiting


class AcceptsWhatNeverFits(Scheduler):
    """A sequence is accepted that is longer than the whole cache."""

    def _prepare(self, sequence: Sequence) -> None:
        count, self.pool.count = self.pool.count, 2**30
        try:
            super()._prepare(sequence)
        finally:
            self.pool.count = count


class LastComeFirstServed(Queue):
    """Whoever came last is admitted first."""

    def add(self, sequence: Sequence, *, aside: bool = False) -> None:
        super().add(sequence, aside=aside)
        if not aside:
            self._line(sequence).move_to_end(sequence, last=False)


class ServesOneTenantFirst(Queue):
    """A tenant keeps its turn as long as it has somebody to send."""

    def pop(self) -> None:
        sequence = self.first()
        assert sequence is not None
        self.remove(sequence)


class NeverReadmits(Queue):
    """Who was preempted is forgotten."""

    def put_back(self, sequence: Sequence) -> None:
        pass


class KeepsDrawsAside(Queue):
    """Further draws stand aside for ever when the one that they wait for is gone."""

    def call(self, parent: Sequence) -> None:
        if parent.status is not Status.FINISHED:
            super().call(parent)


# A step.


class HasRoomForOneMore(BlockTables):
    """The room in a sequence's last block is counted with one token too many."""

    def grow(self, sequences: Sized[Sequence], builder: ScheduledStep) -> None:
        super().grow(sequences, builder)
        for sequence in sequences:
            sequence.next_block_at = min(sequence.next_block_at + 1, sequence.end - 2)


class TellsNobodyOfNewBlocks(BlockTables):
    """A block that is taken ahead is not told to the device."""

    def grow(self, sequences: Sized[Sequence], builder: ScheduledStep) -> None:
        told = builder.grown[:]
        super().grow(sequences, builder)
        builder.grown[:] = told + [
            (one, place) for one, place in builder.grown[len(told) :] if one.computed == one.next_block_at
        ]


class HoldsWithoutANote(Scheduler):
    """One that could not advance is not looked at again when it reaches its edge, and runs on beyond it."""

    def _hold(self, sequence: Sequence) -> None:
        self._forget_next_block(sequence)
        sequence.clock_offset -= 1


class HoldsNobody(Scheduler):
    """Those for whom there was no room are counted as if they had advanced."""

    def _hold(self, sequence: Sequence) -> None:
        self._forget_next_block(sequence)
        sequence.next_block_at += 1
        self._await_next_block(sequence)


class RemembersOldEdges(Scheduler):
    """One that left is still looked at when it would have reached its edge, if by then it runs again."""

    def _forget_next_block(self, sequence: Sequence) -> None:
        pass


class CountsChunksOnly(Scheduler):
    """Decodes are not taken off the budget of tokens."""

    def _decode(self, builder: ScheduledStep) -> None:
        super()._decode(builder)
        builder.budget = self.config.batched_tokens


class SkipsCopyOnWrite(BlockTables):
    """A further draw shares its parent's last block, and writes to it."""

    def _fork(self, sequence: Sequence, parent: Sequence, builder: ScheduledStep, room: int) -> bool:
        forked = super()._fork(sequence, parent, builder, room)
        if forked and builder.copies and builder.copies[-1][1] == sequence.blocks[-1]:
            source, target = builder.copies.pop()
            self.pool.share(source)
            self.pool.release([target])
            sequence.blocks[-1] = source
        return forked


class ForgetsToCopy(BlockTables):
    """A further draw has a last block of its own, into which nothing is copied."""

    def _fork(self, sequence: Sequence, parent: Sequence, builder: ScheduledStep, room: int) -> bool:
        forked = super()._fork(sequence, parent, builder, room)
        builder.copies.clear()
        return forked


class _CallsAtOnce(Queue):
    def add(self, sequence: Sequence, *, aside: bool = False) -> None:
        super().add(sequence)


class SharesBeforeItIsComputed(BlockTables):
    """Further draws share their parent's blocks as soon as it has some."""

    also = _CallsAtOnce

    def _start(self, sequence: Sequence, room: int) -> bool:
        parent = sequence.parent
        if parent is None or not parent.blocks:
            return super()._start(sequence, room)
        full = (sequence.prompt_length - 1) // self.pool.size
        if not self._take(sequence, parent.blocks[:full], full + 1, room):
            return False
        sequence.computed, sequence.published, sequence.prefix_id = full * self.pool.size, 0, sequence.salt
        return True


class PublishesBeforeItIsComputed(Scheduler):
    """A full block can be found as soon as the step that writes it is scheduled."""

    def _chunk(self, sequence: Sequence, builder: ScheduledStep) -> None:
        super()._chunk(sequence, builder)
        self.tables.publish(sequence, sequence.computed)


class LeaksOnFailedAllocation(BlockTables):
    """When there are too few blocks for a whole prompt, those that were taken already are lost."""

    def _take(self, sequence: Sequence, shared: list[int], count: int, room: int) -> bool:
        self.pool.release = lambda blocks: None  # type: ignore[method-assign]
        try:
            return super()._take(sequence, shared, count, room)
        finally:
            del self.pool.release


# Preemption and swap.


class PreemptsTheOldest(Scheduler):
    """Of those who could make room, the one does that has run longest."""

    def _preempt_newer(self, sequence: Sequence, builder: ScheduledStep) -> bool:
        newer = [one for one in self.running if one.rank > sequence.rank]
        if not newer:
            return False
        victim = min(newer, key=RANK)
        self._leave(victim)
        victim.status, builder.preempted = Status.WAITING, True
        self.tables.release(victim)
        self.waiting.put_back(victim)
        return True


class LosesTheTokenInFlight(Scheduler):
    """What a launched step draws for a sequence is dropped if the sequence is preempted meanwhile."""

    def complete(self, step: ScheduledStep, tokens: list[int]) -> list[Sequence]:
        preempted = [(one, one.tokens[:]) for one in step.samplers if one.status in (Status.WAITING, Status.SWAPPED)]
        finished = super().complete(step, tokens)
        for sequence, known in preempted:
            if sequence.status is not Status.FINISHED:
                sequence.tokens[:] = known
        return finished


class LosesSwappedBlocks(BlockTables):
    """Who was swapped out comes back without what it had computed."""

    def _swap_in(self, sequence: Sequence, builder: ScheduledStep, room: int) -> bool:
        swapped = super()._swap_in(sequence, builder, room)
        builder.swaps_in.clear()
        return swapped


class TrustsTheFailedSwap(BlockTables):
    """A step that failed is taken to have swapped out what it should have."""

    def forget_swap(self, sequence: Sequence) -> None:
        sequence.busy -= sequence.status is Status.SWAPPED


# Back from a step.


class CompletesTwice(Scheduler):
    """A completion that comes twice counts twice."""

    def complete(self, step: ScheduledStep, tokens: list[int]) -> list[Sequence]:
        if step.number not in self._flights:
            for sequence, token in zip(step.samplers, tokens, strict=True):
                if sequence.status is not Status.FINISHED:
                    sequence.tokens.append(token)
        return super().complete(step, tokens)


class KeepsWhatCameTooLate(Scheduler):
    """The row that was computed in vain for a sequence that had ended is kept."""

    def complete(self, step: ScheduledStep, tokens: list[int]) -> list[Sequence]:
        for sequence, token in zip(step.samplers, tokens, strict=True):
            if sequence.status is Status.FINISHED:
                sequence.tokens.append(token)
        return super().complete(step, tokens)


class TakesTokensAsTheyCome(Scheduler):
    """The tokens of a step are taken though those of an earlier step are missing."""

    def complete(self, step: ScheduledStep, tokens: list[int]) -> list[Sequence]:
        if step.number in self._flights:
            self._flights = {step.number: self._flights.pop(step.number), **self._flights}
        return super().complete(step, tokens)


class FailsEverybody(Scheduler):
    """A step that fails ends all that run, and not just its own sequences."""

    def fail(self, step: ScheduledStep) -> list[Sequence]:
        failed = super().fail(step)
        rest = self.running if failed else []
        for sequence in rest:
            self._finish(sequence, "error")
        return failed + rest


class ForgetsWhoFailed(Scheduler):
    """A step that fails is dropped, and its sequences wait for its tokens for ever."""

    def fail(self, step: ScheduledStep) -> list[Sequence]:
        self._flights.pop(step.number, None)
        return []


def _planted() -> dict[str, type]:
    parts = (WatchedPool, BlockTables, Queue, FinishRate, Scheduler)
    return {bug.__name__: bug for part in parts for bug in part.__subclasses__() if not bug.__name__.startswith("_")}


BUGS = _planted()


def first_failure(name: str, seeds: int = 2000) -> SeedFailed | None:
    """The first of so many seeds that shows a bug; None where they all pass."""
    for seed in range(seeds):
        try:
            play(seed, bug=BUGS[name])
        except SeedFailed as failure:
            return failure
    return None
