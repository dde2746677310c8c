"""Prove the gradients of a plan before its first step, on a few rows of the sample.

A plan was made for another training, or elsewhere, and nothing else compares the two before it trains. The proof costs
about two steps of a few rows. It finds what the rows of the sample show, at eager speed: compiled blocks are not
compiled for it.
"""

from collections.abc import Iterable

from torch import Tensor

from tonnage.errors import TonnageError
from tonnage.fit.applied import Applied
from tonnage.fit.plan import FitPlan
from tonnage.fit.prove.proof import NotProven, NotTheSame, Proof, prove
from tonnage.fit.stepping.batches import batch_rows, take_rows, tensors
from tonnage.fit.stepping.stepper import trained_parameters
from tonnage.fit.survey.measuring import parameter_bytes
from tonnage.fit.survey.meter import GpuMeter
from tonnage.fit.technique import Technique
from tonnage.fit.training import Batch, Training
from tonnage.fit.weighting import unlike_rows

MOST_ROWS = 8
_ELEMENTS = 1 << 16  # compared per gradient
_DIVIDES = frozenset({"micro-batches", "recompute"})  # techniques that run rows of a batch by themselves


def prove_first(applied: Applied, *, most_rows: int = MOST_ROWS) -> Proof:
    """Prove the applied techniques on a few rows, or on the whole sample if its rows cannot be taken by themselves.

    Raises NotTheSame if gradients differ, and NotProven if they cannot be compared.
    """
    sample = applied.training.sample
    batch = few_rows(applied.training, most_rows)
    if batch is not sample:
        try:
            return prove(applied, batch, compiled=False, elements=_ELEMENTS)
        except (NotTheSame, NotProven):
            raise
        except Exception:  # the model may take no other number of rows: see below
            pass
    try:
        return prove(applied, sample, least_rows=batch_rows(sample), compiled=False, elements=_ELEMENTS)
    except TonnageError:
        raise
    except Exception as problem:
        lines = str(problem).strip().splitlines() or [""]
        raise NotProven(
            f"A pass over the sample raises {type(problem).__name__}: {lines[0][:200]}",
            hint="Give a sample that trains, or prove it on a batch that does: fitted.prove(batch).",
        ) from problem


def few_rows(training: Training, most_rows: int) -> Batch:
    """Return some rows that differ in their labels, and others spread over the sample; the sample if it is not cut."""
    sample = training.sample
    rows = batch_rows(sample)
    most_rows = max(most_rows, 2 if training.micro_batches > 1 else 1)
    if rows <= most_rows or not (_DIVIDES & set(training.applied) or is_divisible(tensors(sample), rows)):
        return sample
    chosen = unlike_rows(sample, -(-most_rows // 2))
    spread = [place * rows // most_rows for place in range(most_rows)]
    others = [row for row in dict.fromkeys([*spread, *range(rows)]) if row not in chosen]
    return take_rows(sample, sorted([*chosen, *others[: most_rows - len(chosen)]]))


def is_divisible(found: Iterable[Tensor], rows: int) -> bool:
    """Return whether every tensor of integers has these rows: others may point at rows, as the edges of a graph do."""
    shared = [tensor for tensor in found if tensor.ndim and tensor.shape[0] not in (1, rows)]
    return all(tensor.is_floating_point() for tensor in shared)


def rows_within(plan: FitPlan, fixed_bytes: int) -> int:
    """Return how many rows the plain model has room for in a plan's budget, by the plan's own figures.

    `fixed_bytes` do not depend on the rows.
    """
    if plan.plain_peak_bytes <= plan.budget_bytes:
        return MOST_ROWS
    room = max(0, plan.budget_bytes - fixed_bytes) / max(1, plan.plain_peak_bytes - fixed_bytes)
    return max(1, min(MOST_ROWS, int(room * plan.batch_rows)))


def fixed_bytes_of(training: Training) -> int:
    """Return the bytes on the card that do not depend on the rows of a batch: what is there, and gradients."""
    return GpuMeter(training.device).allocated_bytes + parameter_bytes(trained_parameters(training.optimizer))


def culprit_of(applied: Applied) -> Technique | None:
    """Return the technique without which the others are proven, if there is one; all are removed."""
    techniques = applied.techniques
    if len(techniques) == 1:
        return techniques[0]
    for technique in reversed(techniques):
        applied.keep(0)
        try:
            applied.add(other for other in techniques if other is not technique)
            prove_first(applied)
        except TonnageError:
            continue
        return technique
    return None
