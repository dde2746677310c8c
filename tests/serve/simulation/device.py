"""The fake GPU: one stream, on which steps run in the order of their launch, and a cache that remembers what was written.

It looks at nothing but the step, as the runner does: known tokens, tables, and what it keeps in each slot. Every read is held
against the sequence's story, so that a block with other tokens than the sequence's own is found at the first look.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

from serve.simulation.scenario import Scenario
from serve.simulation.story import GARBAGE_KEY, GARBAGE_TOKEN, Story
from tonnage.serve.scheduler.sequence import ScheduledStep, ScheduledTokens, Sequence


@dataclass(slots=True)
class Slot:
    """What the device keeps of a running sequence from step to step."""

    owner: Sequence | None = None
    last_token: int = GARBAGE_TOKEN
    table: list[int] = field(default_factory=list)


class Device:
    """Pages of keys on the device and on the host, and what is kept in each slot."""

    def __init__(self, scenario: Scenario, stories: Mapping[int, Story]) -> None:
        self.size = size = scenario.size
        self.pages = [[GARBAGE_KEY] * size for _ in range(scenario.usable + 1)]
        self.host_pages = [[GARBAGE_KEY] * size for _ in range(scenario.host_blocks + 1)]
        self.slots = [Slot() for _ in range(scenario.max_seqs)]
        self.sampled_now: list[Sequence] = []  # in the last step
        self.one_ahead = not scenario.faults.late and not scenario.faults.shuffled
        self.stories = stories
        self.hidden_failures = 0  # steps that went wrong, which the scheduler has not been told of

    def launch(self, step: ScheduledStep) -> list[int]:
        """Run a step; the tokens that it draws."""
        self._move(step)
        for sequence, column in step.grown:
            self.slots[sequence.slot].table[column:] = [sequence.blocks[column]]
        sampled = [self._compute(work, self._continued(work)) for work in step.decodes]
        sampled += [self._compute(work, self._renewed(work)) for work in step.chunks]
        self.sampled_now = step.samplers
        return [token for token in sampled if token is not None]

    def crash(self, step: ScheduledStep, *, moved: bool) -> None:
        """Run a step that fails, before it moved any block or in the middle of its pass: what it should write is garbage.

        Whoever reads that before the scheduler knows draws garbage, too.
        """
        self.hidden_failures += 1
        if moved:
            self._move(step)
        for work in chain(step.decodes, step.chunks):
            for position in range(work.start, work.start + work.count):
                self.pages[work.sequence.blocks[position // self.size]][position % self.size] = GARBAGE_KEY
            self._renewed(work).last_token = GARBAGE_TOKEN
        self.sampled_now = step.samplers

    def _move(self, step: ScheduledStep) -> None:
        # Each kind is one gather and one scatter: a pair must not read what another one writes.
        for name, pairs, sources, targets in (
            ("swaps_out", step.swaps_out, self.pages, self.host_pages),
            ("swaps_in", step.swaps_in, self.host_pages, self.pages),
            ("copies", step.copies, self.pages, self.pages),
        ):
            if not pairs:
                continue
            written = {target for _, target in pairs}
            read = {source for source, _ in pairs} if sources is targets else set[int]()
            assert len(written) == len(pairs) and not written & read, f"{name} {pairs} depend on their order"
            for target, page in [(target, sources[source][:]) for source, target in pairs]:
                targets[target] = page

    def _renewed(self, work: ScheduledTokens) -> Slot:
        """The slot of a sequence, with all that the host knows of it."""
        slot = self.slots[work.sequence.slot]
        slot.table = work.sequence.blocks[:]
        if slot.owner is not work.sequence:
            slot.owner, slot.last_token = work.sequence, GARBAGE_TOKEN
        return slot

    def _continued(self, work: ScheduledTokens) -> Slot:
        """The same, if it drew in the step before: then the device has been told of each new block."""
        slot = self.slots[work.sequence.slot]
        if slot.owner is not work.sequence or slot.owner not in self.sampled_now:
            return self._renewed(work)
        assert slot.table == work.sequence.blocks, f"{describe(work)} has blocks that the device does not know of"
        return slot

    def _ids(self, work: ScheduledTokens, slot: Slot) -> list[int]:
        """The tokens to compute: known ones, or the one that was drawn last and that the host may not have read yet."""
        sequence, end = work.sequence, work.start + work.count
        if end <= len(sequence.tokens):
            return sequence.tokens[work.start : end]
        assert work.count == 1, f"{describe(work)} computes tokens that nobody knows"
        assert sequence in self.sampled_now or not self.one_ahead, (
            f"{describe(work)} comes too soon after an unknown token"
        )
        return [slot.last_token]

    def _compute(self, work: ScheduledTokens, slot: Slot) -> int | None:
        sequence, start, end, size = work.sequence, work.start, work.start + work.count, self.size
        story = self.stories[sequence.id]
        sound = self._reads_its_own(slot.table, start, story) and self._ids(work, slot) == story.tokens[start:end]
        assert sound or self.hidden_failures, f"{describe(work)} reads what is not its own, in blocks {slot.table}"
        for position in range(start, end):
            page = self.pages[sequence.blocks[position // size]]
            page[position % size] = story.keys[position] if sound else GARBAGE_KEY
        if not work.samples:
            return None
        assert end < len(story.tokens), f"{describe(work)} draws more tokens than were asked for"
        slot.last_token = story.tokens[end] if sound else GARBAGE_TOKEN
        return slot.last_token

    def _reads_its_own(self, table: list[int], end: int, story: Story) -> bool:
        size, keys = self.size, story.keys
        for index, first in enumerate(range(0, end, size)):
            last = min(first + size, end)
            if self.pages[table[index]][: last - first] != keys[first:last]:
                return False
        return True


def describe(work: ScheduledTokens) -> str:
    """A piece of work, for a trace."""
    return f"#{work.sequence.id}[{work.start}:{work.start + work.count}]{'→' if work.samples else ''}"
