"""Which GPUs of the catalogue hold a run, and where it would fail on the others, by a replay for each.

GPUs of about the same memory with the same outcome share a row. The requests are those of the GPU that ran
(`recording.replay`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tonnage.hardware import Gpu
from tonnage.hardware.catalogue import cuda_cards
from tonnage.recording import FailedRequest, Recording
from tonnage.recording.replay import least_bytes, outcome_on, outside_on, refused

# The GPU used for runs without a limit: the virtual GPU is measured against it.
MEASURED_CARD = "h200"
_ALIKE_SHARE = 0.04


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
