"""Build a training objective from flags."""

from tonnage.budget.training.adapters import Base
from tonnage.budget.training.objectives import Objective, Reference, objective_names, objective_of
from tonnage.errors import BadLayout
from tonnage.models.shape import ModelShape

_MOST_NEGATIVES = 4096


def asked_objective(
    name: str,
    *,
    adapters: bool,
    reference: Reference | None = None,
    teacher: ModelShape | None = None,
    teacher_base: Base | None = None,
    negatives: int | None = None,
    grad_cache: bool = False,
) -> Objective:
    """Return the objective with its options; raises RequestError for those that do not apply."""
    row = objective_of(name)
    if reference and not row.reference:
        having = ", ".join(other for other in objective_names() if objective_of(other).reference)
        raise BadLayout(f"--reference {reference}: {name} has no reference.", hint=f"Leave it out; {having} have one.")
    if reference == "adapters-off" and not adapters:
        hint = "Add --lora 16, or write --reference copy."
        raise BadLayout("--reference adapters-off: no adapters are trained.", hint=hint)
    if name == "distill" and teacher is None:
        hint = "Add --teacher MODEL, like --teacher llama-3.1-70b."
        raise BadLayout("--objective distill takes a teacher.", hint=hint)
    if name != "distill" and (teacher is not None or teacher_base):
        flag = "--teacher" if teacher is not None else "--teacher-weights"
        raise BadLayout(f"{flag}: {name} has no teacher.", hint="Add --objective distill, or leave it out.")
    if name != "contrastive" and (negatives is not None or grad_cache):
        flag = "--grad-cache" if grad_cache else "--negatives"
        raise BadLayout(f"{flag}: {name} compares no pairs of a batch.", hint="Add --objective contrastive.")
    if negatives is not None and not 0 <= negatives <= _MOST_NEGATIVES:
        problem = f"--negatives {negatives}: a pair has between 0 and {_MOST_NEGATIVES:,} of its own."
        raise BadLayout(problem, hint="Write --negatives 7, say.")
    how: Reference | None = reference or ("adapters-off" if adapters else "copy") if row.reference else None
    return objective_of(
        name,
        sequences=row.sequences + (negatives or 0),
        how=how,
        teacher=teacher,
        teacher_base=teacher_base or "16-bit",
        grad_cache=grad_cache,
    )
