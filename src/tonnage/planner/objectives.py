"""Build a training objective from flags, and check what it can be combined with."""

from typing import TYPE_CHECKING

from tonnage.budget.adapters import Base
from tonnage.budget.objectives import Objective, Reference, objective_names, objective_of
from tonnage.errors import BadLayout
from tonnage.models.shape import ModelShape

if TYPE_CHECKING:
    from tonnage.planner.request import TrainingRequest

_MOST_NEGATIVES = 4096
_FRAMEWORKS = ("torch", "fsdp2", "deepspeed")
# Vocabularies of one tokenizer are padded to different lengths, by less than this share.
_PADDING = 0.01


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
        raise BadLayout(
            "--objective distill takes a teacher.", hint="Add --teacher MODEL, like --teacher llama-3.1-70b."
        )
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


def check_objective(request: "TrainingRequest", shape: ModelShape) -> None:
    """Raise RequestError for layouts and models that do not support the objective."""
    objective, name = request.objective, request.objective.name
    split = next((flag for flag in ("tp", "pp", "cp", "ep") if (getattr(request, flag) or 1) > 1), None)
    if split is not None:
        problem = f"--{split} with --objective {name}: trainers for it shard the model, and do not split it."
        raise BadLayout(problem, hint="Leave it out, or write --zero 3.")
    if request.framework not in (None, *_FRAMEWORKS):
        problem = f"--framework {request.framework} trains on next tokens, not by {name}."
        raise BadLayout(problem, hint=f"Choose {', '.join(_FRAMEWORKS)}, or leave it out.")
    writes = shape.decoder.causal or objective.teacher is not None
    if objective.has_logits and not (shape.logits and shape.vocab and writes):
        problem = f"--objective {name} takes a model that writes, and {shape.name} does not."
        raise BadLayout(problem, hint="Choose classify or contrastive, or leave it out.")
    if not objective.has_logits and request.loss != "full":
        hint = "Leave --loss out."
        raise BadLayout(f"--loss {request.loss}: {name} has no scores over a vocabulary to make in parts.", hint=hint)
    teacher = objective.teacher
    if teacher is not None and abs(teacher.vocab - shape.vocab) > _PADDING * shape.vocab:
        words = f"{shape.name} has {shape.vocab:,} words, {teacher.name} {teacher.vocab:,}"
        raise BadLayout(f"{words}: their scores cannot be compared.", hint="Choose a teacher with the same tokenizer.")
    if objective.sees_whole_batch and request.micro_batch and request.global_batch:
        hint = "Leave one of them out, or add --grad-cache."
        raise BadLayout("--micro-batch with --global-batch: the pairs of a batch go through in one pass.", hint=hint)
