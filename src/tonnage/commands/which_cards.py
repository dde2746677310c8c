"""What `tonnage plan train` and `plan serve` do where no cards are named: say which hold the model."""

import sys
from argparse import Namespace
from typing import TYPE_CHECKING

from tonnage.errors import RequestError

if TYPE_CHECKING:
    from tonnage.models.shape import ModelShape
    from tonnage.planner.holders import Holder


def check_cards_named(options: Namespace) -> None:
    """A page and a launch are of some cards: refuse to make them of all."""
    asked = {"--export": options.export is not None, "--html": options.html is not None, "--open": options.open}
    for flag in (flag for flag, given in asked.items() if given and not options.gpus):
        raise RequestError(
            f"{flag} needs --gpus.", hint="Name the cards, like --gpus 8xh200; without, they are compared."
        )


def publish(shape: "ModelShape", holders: "list[Holder]", options: Namespace, *, what: str, most: str) -> int:
    """Print the table, or write it as JSON; the exit status."""
    from tonnage.report.holders import holder_figures, holder_lines

    if options.json:
        from tonnage.report.output import write_json

        write_json(options.json, holder_figures(shape, holders, most=most))
    if options.json != "-":
        sys.stdout.write("".join(f"{line}\n" for line in holder_lines(shape, holders, what=what, most=most)))
    return 0 if any(holder.most for holder in holders) else 1
