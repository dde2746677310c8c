"""The flags of `tonnage plan train` that say what is trained for."""

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, get_args

if TYPE_CHECKING:
    from tonnage.budget.objectives import Objective


def add_objective(parser: ArgumentParser) -> None:
    """An objective, and what goes with some of them."""
    from tonnage.budget.adapters import Base
    from tonnage.budget.objectives import Reference, objective_names

    add = parser.add_argument
    names = objective_names()
    add("--objective", choices=names, default=names[0], metavar="NAME", help=f"{', '.join(names)} (default: the first)")
    add("--reference", choices=get_args(Reference), help="of a preference (default: copy; with --lora adapters-off)")
    add("--teacher", metavar="MODEL", help="with --objective distill: whose scores are learned")
    add("--teacher-weights", choices=get_args(Base), help="how the teacher is kept (default: 16-bit)")
    add("--negatives", type=int, metavar="N", help="with --objective contrastive: texts beside each pair")
    add("--grad-cache", action="store_true", help="with --objective contrastive: a batch in micro-batches (GradCache)")


def objective_from(options: Namespace) -> "Objective":
    """As the flags say."""
    from tonnage.models import find_model
    from tonnage.planner.objectives import asked_objective

    return asked_objective(
        options.objective,
        adapters=bool(options.lora or options.qlora),
        reference=options.reference,
        teacher=find_model(options.teacher, online=options.online) if options.teacher else None,
        teacher_base=options.teacher_weights,
        negatives=options.negatives,
        grad_cache=options.grad_cache,
    )
