"""Flags that several commands have, or that make a group of their own: for parsers of argparse."""

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args

from tonnage.errors import BadSize
from tonnage.units import parse_amount

if TYPE_CHECKING:
    from tonnage.budget.objectives import Objective
    from tonnage.report.campaign import Campaign


class Parser(ArgumentParser):
    """An ArgumentParser that takes no abbreviations, and names the closest flag where one is not known."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        _, unknown, words = message.partition("unrecognized arguments: ")
        flag = next((word.partition("=")[0] for word in words.split() if word.startswith("--")), "")
        closest = get_close_matches(flag, self._option_string_actions, n=1) if unknown and flag else []
        super().error(message + "".join(f" (did you mean {name}?)" for name in closest))


def add_campaign(parser: ArgumentParser) -> None:
    """How long the whole training takes, and what it costs."""
    add = parser.add_argument
    add("--tokens", type=_amount, metavar="N", help="say how long so many tokens take (1B, 1e9)")
    add("--samples", type=_amount, metavar="N", help="the same for so many samples")
    add("--epochs", type=_amount, default=1.0, metavar="N", help="how often they are gone through")
    add("--price", type=_amount, metavar="P", help="what an hour of one card costs")


def campaign_of(options: Namespace) -> "Campaign":
    """What the flags say."""
    from tonnage.report.campaign import Campaign

    return Campaign(tokens=options.tokens, samples=options.samples, epochs=options.epochs, price=options.price)


def _amount(text: str) -> float:
    try:
        return parse_amount(text)
    except BadSize as problem:
        raise ArgumentTypeError(f"{problem} {problem.hint}") from None


def add_page_options(parser: ArgumentParser) -> None:
    """`--html` and `--open`."""
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page that opens offline")
    parser.add_argument("--open", action="store_true", help="show the page in the browser")


def page_of(options: Namespace) -> Path | None:
    """The file for the page, checked before any work is done for it."""
    if options.html is None and not options.open:
        return None
    from tonnage.report.output import page_target

    return page_target(options.html, opens=options.open, force=options.force)


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
