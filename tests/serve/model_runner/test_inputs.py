"""A step's inputs on the device are what its sequences say, however they came there."""

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.serve.batch import Batch
from tonnage.serve.model_runner.inputs import Inputs, decode_batch, mixed_seed
from tonnage.serve.sampling import Sampling
from tonnage.serve.scheduler.sequence import ScheduledStep, ScheduledTokens, Sequence

CPU = torch.device("cpu")
BLOCK, SLOTS, COLUMNS = 4, 5, 12


def make() -> Inputs:
    return Inputs(max_seqs=SLOTS, columns=COLUMNS, block=BLOCK, batched_tokens=64, device=CPU)


class Story:
    """Sequences that come, grow, are thrown out and come back in other slots and blocks, as a scheduler would have it."""

    def __init__(self, seed: int) -> None:
        self.random, self.inputs = Random(seed), make()
        self.free_slots, self.free_blocks = list(range(SLOTS)), list(range(1, 100))
        self.running: dict[Sequence, int] = {}  # with the number of tokens computed
        self.out: list[Sequence] = []
        self.works: dict[Sequence, ScheduledTokens] = {}  # one for as long as a sequence decodes
        self.last: tuple[ScheduledTokens, ...] = ()
        self.in_flight: dict[Sequence, int] = {}
        self.ways: set[str] = set()

    def step(self) -> None:
        """Some decode, some come (back), some go; the device draws for those that ran before their token is known."""
        random = self.random
        some = random.random() < 0.2
        for sequence, done in list(self.running.items()):
            if done >= COLUMNS * BLOCK or (some and random.random() < 0.5):
                self.throw_out(sequence)
        if random.random() < 0.05:
            self.stumble()
        held = {one for one in self.running if random.random() < 0.1}
        going = [one for one in self.running if one not in held]
        decodes = tuple(self.works.setdefault(one, ScheduledTokens(one, 0, 1, True)) for one in going)
        ahead, grown = random.choice((0, 0, 0, 3, 6)), []
        for work in decodes:
            one, work.start = work.sequence, self.running[work.sequence]
            had = len(one.blocks)
            self.cover(one, min(work.start + 1 + ahead, COLUMNS * BLOCK))
            grown += [(one, column) for column in range(had, len(one.blocks))]
            self.running[one] += 1
        chunks = [self.admit() for _ in range(random.choice((0, 0, 0, 0, 0, 0, 1, 2))) if self.free_slots]
        if decodes or chunks:
            self.note_way(decodes, alone=not chunks)
            self.last = self.last if decodes == self.last else decodes
            self.check(ScheduledStep(0, self.last, tuple(chunks), grown=tuple(grown)))

    def stumble(self) -> None:
        """A step was not launched: the host waits for those in flight, and sends everything anew."""
        for sequence in list(self.in_flight):
            self.land(sequence)
        self.inputs.forget()

    def note_way(self, decodes: tuple[ScheduledTokens, ...], *, alone: bool) -> None:
        """The same as before, or fewer of them, need not be looked up."""
        if alone and decodes == self.last:
            self.ways.add("the same")
        elif alone and set(decodes) < set(self.last):
            self.ways.add("some left")

    def admit(self) -> ScheduledTokens:
        sequence = self.out.pop() if self.out and self.random.random() < 0.6 else self.newcomer()
        sequence.slot = self.free_slots.pop(self.random.randrange(len(self.free_slots)))
        self.cover(sequence, len(sequence.tokens))
        # What was found in a cache is not computed.
        start = self.random.randrange(len(sequence.tokens))
        self.running[sequence] = len(sequence.tokens)
        return ScheduledTokens(sequence, start, len(sequence.tokens) - start, True)

    def newcomer(self) -> Sequence:
        tokens = [self.random.randrange(1000) for _ in range(self.random.randint(1, 14))]
        heat, top_k = self.random.choice(((0, 0), (0.5, 0), (0.5, 3), (1, 0)))
        sampling = Sampling(temperature=heat, top_k=top_k, seed=self.random.randrange(10**9))
        return Sequence(0, tokens, sampling, len(tokens), sample_index=self.random.randrange(3))

    def cover(self, sequence: Sequence, length: int) -> None:
        while len(sequence.blocks) * BLOCK < length:
            sequence.blocks.append(self.free_blocks.pop(self.random.randrange(len(self.free_blocks))))

    def throw_out(self, sequence: Sequence) -> None:
        del self.running[sequence]
        self.works.pop(sequence, None)
        self.land(sequence)
        self.free_slots.append(sequence.slot)
        self.free_blocks += sequence.blocks
        sequence.slot, sequence.blocks = -1, []
        if len(sequence.tokens) < 30:
            self.out.append(sequence)

    def check(self, step: ScheduledStep) -> None:
        inputs = self.inputs
        inputs.take(step)
        if step.chunks or inputs.renewed:
            batch, at = inputs.mixed(step)
            self.ways.add("mixed")
        else:
            size = min(SLOTS, len(step.decodes) + self.random.randint(0, 3))
            inputs.decodes(size)
            batch, at = decode_batch(inputs.rows(size), inputs.slots, BLOCK)
            self.check_padding(batch, at, len(step.decodes))
            self.ways.add("padded" if size > len(step.decodes) else "decodes")
        works = [*step.decodes, *step.chunks]
        for sequence in list(self.in_flight):
            self.land(sequence)
        self.check_rows(batch, works)
        count = len(works)
        assert inputs.sampling_sequences == step.samplers == [work.sequence for work in works]
        assert inputs.special == [row for row, one in enumerate(inputs.sampling_sequences) if one.sampling.top_k]
        assert at[:count].tolist() == [work.sequence.slot for work in works]
        assert inputs.slots.temperatures[at[:count]].tolist() == [
            one.sampling.temperature for one in inputs.sampling_sequences
        ]
        seeds = [mixed_seed(one.sampling.seed or 0, one.sample_index) for one in inputs.sampling_sequences]
        assert inputs.slots.seeds[at[:count]].tolist() == seeds
        # The device draws; the host learns of it after the next step is made.
        sampled = [self.random.randrange(1000) for _ in works]
        inputs.slots.last_tokens[at[:count]] = torch.tensor(sampled)
        self.in_flight = dict(zip(inputs.sampling_sequences, sampled, strict=True))

    def land(self, sequence: Sequence) -> None:
        """The host learns of its token."""
        if sequence in self.in_flight:
            sequence.tokens.append(self.in_flight.pop(sequence))

    def check_rows(self, batch: Batch, works: list[ScheduledTokens]) -> None:
        ids = [token for work in works for token in work.sequence.tokens[work.start : work.start + work.count]]
        places = [(work.sequence, work.start + n) for work in works for n in range(work.count)]
        rows = len(places)
        assert batch.token_ids[:rows].tolist() == ids
        assert batch.positions[:rows].tolist() == [position for _, position in places]
        expected = [one.blocks[position // BLOCK] * BLOCK + position % BLOCK for one, position in places]
        assert batch.slots[:rows].tolist() == expected
        for row, work in enumerate(works):
            own = work.sequence.blocks
            assert batch.tables[row, : len(own)].tolist() == own
            assert not batch.tables[row, len(own) :].any()
        assert batch.lengths[: len(works)].tolist() == [work.start + work.count for work in works]
        chunks = [work.count for work in works[batch.decodes :]] if batch.longest_chunk else []
        assert batch.chunk_starts.tolist() == np.cumsum([0, *chunks]).tolist()
        assert batch.longest_chunk == max(chunks, default=0)
        lasts = np.cumsum([work.count for work in works]) - 1
        assert (np.arange(rows) if batch.samples is None else batch.samples).tolist() == lasts.tolist()
        self.check_order(batch)

    def check_order(self, batch: Batch) -> None:
        """Every row once, the longest first."""
        assert batch.order is not None and sorted(batch.order.tolist()) == list(range(batch.decodes))
        lengths = batch.lengths[batch.order.long()].tolist()
        assert lengths == sorted(lengths, reverse=True)

    def check_padding(self, batch: Batch, at: torch.Tensor, count: int) -> None:
        assert (at[count:] == SLOTS).all()
        assert not batch.lengths[count:].any() and not batch.slots[count:].any() and not batch.tables[count:].any()


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_inputs_are_what_the_sequences_say(seed: int) -> None:
    story = Story(seed)
    for _ in range(40):
        story.step()


def test_the_story_takes_every_way() -> None:
    story = Story(1)
    for _ in range(200):
        story.step()
    assert story.ways == {"mixed", "padded", "decodes", "the same", "some left"}


@pytest.mark.parametrize("gone", [{0}, {4}, {1, 2}, {0, 2, 4}])
def test_those_who_stay_are_not_looked_up_again(gone: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, many = make(), [sequence_in(slot, [1] * (slot + 1), [slot + 1, slot + 10]) for slot in range(5)]
    many[3].sampling = Sampling(top_p=0.5)
    inputs.take(ScheduledStep(0, (), tuple(ScheduledTokens(one, 0, len(one.tokens), True) for one in many)))
    works = tuple(ScheduledTokens(one, len(one.tokens), 1, True) for one in many)
    inputs.take(ScheduledStep(1, works, ()))
    monkeypatch.setattr(inputs, "_look_up", lambda *_: pytest.fail("all rows were looked up"))
    stayed = tuple(work for row, work in enumerate(works) if row not in gone)
    inputs.take(ScheduledStep(2, stayed, ()))
    inputs.decodes(len(stayed))
    slots, positions, order = inputs.rows(len(stayed)).tolist()
    assert slots == [work.sequence.slot for work in stayed] == [one.slot for one in inputs.sampling_sequences]
    assert positions == [work.start + 1 for work in stayed]
    assert order == list(range(len(stayed)))[::-1] and inputs.special == [slots.index(3)]


def test_nothing_is_sent_while_the_same_go_on() -> None:
    """The device moves their positions on; a new block is all that it is told."""
    inputs, one = make(), sequence_in(2, [5, 6], [9])
    inputs.take(ScheduledStep(0, (), (ScheduledTokens(one, 0, 2, True),)))
    inputs.mixed(ScheduledStep(0, (), (ScheduledTokens(one, 0, 2, True),)))
    works = (ScheduledTokens(one, 2, 1, True),)
    inputs.take(ScheduledStep(1, works, ()))
    inputs.decodes(3)
    decode_batch(inputs.rows(3), inputs.slots, BLOCK)
    sent = []
    inputs._row_staging.send_again = sent.append
    for position in range(3, 9):
        grown = ((one, position // BLOCK),) if position % BLOCK == 0 else ()
        one.blocks += [10 + position] * len(grown)
        inputs.take(ScheduledStep(position, works, (), grown=grown))
        inputs.decodes(3)
        batch, _ = decode_batch(inputs.rows(3), inputs.slots, BLOCK)
        assert batch.positions.tolist() == [position, 0, 0] and batch.lengths.tolist() == [position + 1, 0, 0]
        assert batch.slots.tolist() == [one.blocks[position // BLOCK] * BLOCK + position % BLOCK, 0, 0]
    assert not sent


def sequence_in(slot: int, tokens: list[int], blocks: list[int]) -> Sequence:
    return Sequence(slot, tokens, Sampling(temperature=0), len(tokens), slot=slot, blocks=blocks)


def test_a_step_that_failed_is_forgotten() -> None:
    inputs, one = make(), sequence_in(2, [5, 6, 7], [9])
    inputs.take(ScheduledStep(0, (), (ScheduledTokens(one, 0, 3, True),)))
    inputs.forget()
    one.tokens.append(8)
    inputs.take(ScheduledStep(1, (ScheduledTokens(one, 3, 1, True),), ()))
    assert inputs.renewed == [one]
    batch, _ = inputs.mixed(ScheduledStep(1, (ScheduledTokens(one, 3, 1, True),), ()))
    assert batch.token_ids.tolist() == [8] and batch.tables[0].tolist() == [9]


def test_a_sequence_back_from_the_host_is_sent_whole() -> None:
    """Even where it decodes beside one whose token only the device knows."""
    inputs, here, back = make(), sequence_in(0, [1, 2], [3]), sequence_in(1, [4, 5], [6])
    inputs.take(ScheduledStep(0, (), (ScheduledTokens(here, 0, 2, True), ScheduledTokens(back, 0, 2, True))))
    inputs.mixed(ScheduledStep(0, (), (ScheduledTokens(here, 0, 2, True), ScheduledTokens(back, 0, 2, True))))
    inputs.slots.last_tokens[0] = 77
    back.tokens.append(55)
    back.blocks, back.slot = [8], 4
    step = ScheduledStep(
        1, (ScheduledTokens(here, 2, 1, True), ScheduledTokens(back, 2, 1, True)), (), swaps_in=((1, 8),)
    )
    inputs.take(step)
    batch, _ = inputs.mixed(step)
    assert batch.token_ids.tolist() == [77, 55]
    assert batch.tables[:, 0].tolist() == [3, 8]


@pytest.mark.parametrize(("sampling", "special"), [
    (Sampling(), False),
    (Sampling(temperature=0), False),
    (Sampling(temperature=0, top_k=3), False),
    (Sampling(top_p=0.5), True),
    (Sampling(temperature=0, logprobs=0), True),
])  # fmt: skip
def test_rows_that_need_more_than_the_plain_draw(sampling: Sampling, special: bool) -> None:
    inputs, one = make(), sequence_in(0, [1, 2], [3])
    one.sampling = sampling
    inputs.take(ScheduledStep(0, (), (ScheduledTokens(one, 0, 2, True),)))
    assert inputs.special == ([0] if special else [])


def test_seeds_differ_by_draw_and_are_signed_numbers_of_64_bits() -> None:
    seeds = {mixed_seed(seed, sample_index) for seed in (-(2**63), -1, 0, 1, 2**63 - 1) for sample_index in range(50)}
    assert len(seeds) == 250 and all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert min(seeds) < 0 < max(seeds)
