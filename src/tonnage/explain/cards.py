"""Which cards of the catalogue hold a run, and where it would die on those that do not: a replay for each.

Cards of about the same memory with the same answer are one row. The requests are those of the card that ran (`recording.replay`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tonnage.hardware import Gpu, all_gpus
from tonnage.recording import OutOfMemory, Recording
from tonnage.recording.replay import least_bytes, outcome_on, outside_on, refused

# The card that a run without a limit is made on: the one that the virtual GPU is measured against.
MEASURED_CARD = "h200"
_ALIKE_SHARE = 0.04


@dataclass(frozen=True, slots=True)
class CardAnswer:
    """A card, the most that the process takes on it, and the request that fails there, if one does."""

    gpu: Gpu
    process_bytes: int
    oom: OutOfMemory | None

    @property
    def left_bytes(self) -> int:
        """What the card has beside it."""
        return self.gpu.memory_bytes - self.process_bytes


@dataclass(frozen=True, slots=True)
class AllCards:
    """Every card, smallest first, and the memory of the smallest card that would hold the run."""

    needed_bytes: int
    answers: tuple[CardAnswer, ...]

    @property
    def smallest(self) -> CardAnswer | None:
        """The one with the least memory that holds it."""
        return next((answer for answer in self.answers if answer.oom is None), None)

    def rows(self) -> Iterator[list[CardAnswer]]:
        """Neighbours of about the same memory that hold it, or on which it dies at the same place."""
        row: list[CardAnswer] = []
        for answer in sorted(self.answers, key=lambda answer: (answer.oom is None, answer.gpu.memory_bytes)):
            if row:
                near = answer.gpu.memory_bytes <= (1 + _ALIKE_SHARE) * row[0].gpu.memory_bytes
                if not near or _place(row[0].oom) != _place(answer.oom):
                    yield row
                    row = []
            row.append(answer)
        yield row


def _place(oom: OutOfMemory | None) -> tuple[object, ...]:
    return (oom.step, oom.phase, oom.line) if oom else ()


def on_all_cards(recording: Recording, cards: Iterable[Gpu] = ()) -> AllCards:
    """What each card (without any: each of the catalogue that runs CUDA) does with all that the run needs."""
    found: dict[tuple[int, int], tuple[int, OutOfMemory | None]] = {}
    answers = []
    chosen = list(cards) or [card for card in all_gpus() if card.runs_cuda]
    for card in sorted(chosen, key=lambda card: card.memory_bytes):
        outside = outside_on(recording, card)
        key = card.memory_bytes, outside
        if key not in found:
            outcomes = outcome_on(recording, card)
            found[key] = outcomes.peak_reserved_bytes + outside, refused(outcomes)
        answers.append(CardAnswer(card, *found[key]))
    return AllCards(least_bytes(recording), tuple(answers))
