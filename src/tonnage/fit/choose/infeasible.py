"""Explain why nothing fits: the smallest budget that would do, what it takes, and the next larger card."""

from typing import Any

from tonnage.errors import TonnageError
from tonnage.fit.choose.placement import ResidentState
from tonnage.fit.choose.solver import Solution, solve
from tonnage.fit.survey.survey import Survey
from tonnage.hardware.catalogue import cuda_cards, first_that_holds
from tonnage.units import format_bytes

_PRECISION = 1 / 128  # relative to the smallest budget


class DoesNotFit(TonnageError, MemoryError):
    """No set of techniques brings the training within the budget."""

    exit_code = 1

    def __init__(self, problem: str, *, hint: str, smallest_bytes: int | None) -> None:
        super().__init__(problem, hint=hint)
        self.smallest_bytes = smallest_bytes


def does_not_fit(
    resident: ResidentState, budget_bytes: int, smallest: Solution | None, needed_bytes: int
) -> DoesNotFit:
    """Build the error; `smallest` is the solution of least memory, which needs `needed_bytes`."""
    problem = (
        f"Nothing that keeps the gradients fits {format_bytes(budget_bytes)}: parameters take "
        f"{format_bytes(resident.parameters_bytes)}, what else is on the card (the sample, library workspaces) "
        f"{format_bytes(resident.besides_bytes)}, gradients {format_bytes(resident.gradients_bytes)}, optimizer states "
        f"{format_bytes(resident.states_bytes)}."
    )
    if smallest is None:
        hint = "Even one row with every technique does not fit this card: use a shorter sequence, or more GPUs."
        return DoesNotFit(problem, hint=hint, smallest_bytes=None)
    words, card = _words(smallest), _card(needed_bytes)
    hint = f"The smallest budget that would do is {format_bytes(needed_bytes)}, with {words}{card}"
    return DoesNotFit(problem, hint=hint, smallest_bytes=needed_bytes)


def smallest_budget(survey: Survey, resident: ResidentState, **options: Any) -> Solution | None:
    """Bisect for the smallest budget; `options` are passed on to `solve`."""

    def best(budget_bytes: int) -> Solution | None:
        found = solve(survey.sizes, resident, budget_bytes=budget_bytes, **options)
        return min(found, key=lambda solution: solution.peak_bytes, default=None)

    high = 4 * survey.meter.capacity_bytes
    found = best(high)
    low = resident.held_bytes
    while found is not None and min(high, found.peak_bytes) - low > _PRECISION * found.peak_bytes:
        high = min(high, found.peak_bytes)
        middle = (low + high) // 2
        smaller = best(middle)
        found, low = (smaller, low) if smaller is not None else (found, middle)
    return found


def _words(solution: Solution) -> str:
    layout = solution.layout
    parts = [f"{layout.micro_batches} micro-batches"] if layout.micro_batches > 1 else []
    if layout.slices > 1:
        parts.append(f"blocks recomputed in {layout.slices} slices")
    if solution.placement.name != "plain":
        parts.append(solution.placement.name)
    return ", ".join(parts) or "the same techniques"


def _card(needed_bytes: int) -> str:
    """Name the smallest card of the catalogue that holds it, with 5 % to spare for the CUDA context."""
    cards = [card for card in cuda_cards() if card.family != "laptop"]
    smallest = first_that_holds(cards, lambda card: card.memory_bytes * 0.95 > needed_bytes)
    if smallest is None:
        return "; no single card has that much."
    return f"; the next card that has it is {smallest.name} ({format_bytes(smallest.memory_bytes)})."
