"""The flags that name a whole training, for every command that knows how long a step takes."""

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import TYPE_CHECKING

from tonnage.errors import BadSize
from tonnage.units import parse_amount

if TYPE_CHECKING:
    from tonnage.report.campaign import Campaign


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
