"""The total memory of a run that ran out of it and went on, and the cards and batch that hold all of it.

Nothing is extrapolated: each card and batch named was replayed, with every event of the whole run through the allocator
at that card's limit. The requests are those of the GPU that ran. GPUs of about the same memory with the same outcome
share a row.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from tonnage.explain.case import needed_of
from tonnage.explain.rewriting import resized
from tonnage.hardware import Gpu
from tonnage.hardware.catalogue import cuda_cards
from tonnage.ledger import Category
from tonnage.recording import Allocation, FailedRequest, Recording
from tonnage.recording.beyond import REPEATS, TO_ITS_END, ending_of
from tonnage.recording.replay import least_bytes, outcome_on, outside_on, refused

_BATCHED = {Category.ACTIVATIONS, Category.INPUTS, Category.KV_CACHE}
_MOST_SHARE = 0.9
# The GPU used for runs without a limit: the virtual GPU is measured against it.
MEASURED_CARD = "h200"
_ALIKE_SHARE = 0.04


@dataclass(frozen=True, slots=True)
class Total:
    """What the whole run needs.

    `needed_bytes` is the memory of the smallest card that would hold it; `ending` is how the run ended
    (`recording.beyond`). `batch` is the largest that fits the card, out of `of_batch`; None if unknown.
    """

    needed_bytes: int
    peak_allocated_bytes: int
    step: int
    phase: str
    line: str
    ending: str
    batch: int | None = None
    of_batch: int | None = None


def total_of(recording: Recording) -> Total | None:
    """Return the total; None if the run did not fail, or if nothing is known after the failure."""
    if recording.oom is None or recording.whole is None:
        return None
    needed = needed_of(recording)
    at, of_batch, ending = needed.peak_allocation, batch_of(needed), ending_of(recording)
    # If a run was cut off or failed otherwise, a smaller batch's later needs are unknown.
    batch = largest_batch(needed, of_batch) if of_batch and ending in (TO_ITS_END, REPEATS) else None
    step, phase, line = (at.step, at.phase, at.line) if at else (0, "", "")
    peak, of_batch = needed.peak_allocated_bytes, of_batch if batch else None
    return Total(least_bytes(needed), peak, step, phase, line, ending, batch, of_batch)


def batch_of(needed: Recording) -> int | None:
    """Return the first dimension of the inputs at the peak, or of all inputs; None if they differ."""
    inputs = [a for a in needed.allocations if a.category is Category.INPUTS and a.shape and len(a.shape) > 1]
    at_peak = {a.index for a in needed.live_at_peak}
    by_extent: Counter[int] = Counter()
    for a in [a for a in inputs if a.index in at_peak] or inputs:
        by_extent[a.shape[0] if a.shape else 0] += a.block_bytes
    extent = max(by_extent, key=by_extent.__getitem__, default=0)
    return extent if extent > 1 and by_extent[extent] >= _MOST_SHARE * sum(by_extent.values()) else None


def largest_batch(needed: Recording, of_batch: int) -> int | None:
    """Return the largest smaller batch with which the whole run fits the card; None if none does."""
    # A weight's shape, and that of its transpose.
    parameters = {a.shape for a in needed.allocations if a.category is Category.PARAMETERS and a.shape}
    weights = parameters | {shape[::-1] for shape in parameters}
    evaluates = needed.peak_allocation is not None and needed.peak_allocation.phase == "evaluation"
    made = (a for a in needed.allocations if a.phase == "forward" and a.category in _BATCHED)
    results = {a.shape for a in made if not _is_cast(a)}

    def is_of_batch(a: Allocation) -> bool:
        # Evaluation has a batch of its own.
        if a.category not in _BATCHED or not a.shape or (a.phase == "evaluation") != evaluates:
            return False
        # Casts of weights, and their gradients before accumulation, have the shape of weights.
        if a.shape in weights and (_is_cast(a) or a.shape not in results):
            return False
        return a.shape[0] % of_batch == 0 or of_batch in a.shape

    def fails(spared: int) -> bool:
        share = (of_batch - spared) / of_batch
        smaller = resized(needed, lambda a: share if is_of_batch(a) else 1.0)
        return outcome_on(replace(needed, allocations=smaller)).failed is not None

    # What fits with a batch fits with a smaller one, so bisecting saves most replays.
    spared = bisect_left(range(1, of_batch), True, key=lambda count: not fails(count)) + 1
    return of_batch - spared if spared < of_batch else None


def _is_cast(a: Allocation) -> bool:
    return a.operator.removeprefix("aten::") in ("to", "_to_copy", "copy_", "clone")


@dataclass(frozen=True, slots=True)
class CardAnswer:
    """A GPU, the process's peak memory on it, and the request that fails there, if any."""

    gpu: Gpu
    process_bytes: int
    oom: FailedRequest | None

    @property
    def left_bytes(self) -> int:
        """Memory that the process leaves free."""
        return self.gpu.memory_bytes - self.process_bytes


@dataclass(frozen=True, slots=True)
class AllCards:
    """Every GPU, smallest first, and the memory that the smallest sufficient card would need."""

    needed_bytes: int
    answers: tuple[CardAnswer, ...]

    @property
    def smallest(self) -> CardAnswer | None:
        """The GPU with the least memory that holds the run."""
        return next((answer for answer in self.answers if answer.oom is None), None)

    def rows(self) -> Iterator[list[CardAnswer]]:
        """Yield groups of neighbours with about the same memory that hold it, or on which it fails at the same place."""
        row: list[CardAnswer] = []
        for answer in sorted(self.answers, key=lambda answer: (answer.oom is None, answer.gpu.memory_bytes)):
            near = not row or answer.gpu.memory_bytes <= (1 + _ALIKE_SHARE) * row[0].gpu.memory_bytes
            places = {(a.oom.step, a.oom.phase, a.oom.line) if a.oom else None for a in (*row[:1], answer)}
            if not near or len(places) > 1:
                yield row
                row = []
            row.append(answer)
        yield row


def on_all_cards(recording: Recording, cards: Iterable[Gpu] = ()) -> AllCards:
    """Replay the run on each card; by default on every CUDA card of the catalogue."""
    found: dict[tuple[int, int], tuple[int, FailedRequest | None]] = {}
    answers = []
    for card in sorted(cards, key=lambda card: card.memory_bytes) or cuda_cards():
        outside = outside_on(recording, card)
        key = card.memory_bytes, outside
        if key not in found:
            outcomes = outcome_on(recording, card)
            found[key] = outcomes.peak_reserved_bytes + outside, refused(outcomes)
        answers.append(CardAnswer(card, *found[key]))
    return AllCards(least_bytes(recording), tuple(answers))
