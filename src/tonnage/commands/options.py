"""The commands that argparse parses, with their words and flags (flags.json), and what several of them do with these.

In flags.json a flag without settings has those of the section "shared"; a choice like "budget.training.adapters:Base" stands for
all that this name has, and so does a default.
"""

import json
import re
import sys
from argparse import REMAINDER, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args

from tonnage.errors import BadSize, RequestError
from tonnage.units import parse_amount

if TYPE_CHECKING:
    from tonnage.models.shape import ModelShape
    from tonnage.planner.holders import Holder
    from tonnage.report.step_time import Campaign
    from tonnage.virtual.redirect import Redirection


_WRITES_IN_PLACE = (
    "tonnage: WARNING: --write lets the script change and delete your files. Checkpoints and results that it writes on a\n"
    "         virtual GPU hold made-up values, and replace those that are there.\n"
)


class Parser(ArgumentParser):
    """An ArgumentParser of sections of flags.json, without abbreviations; it names the closest flag to one not known."""

    def __init__(self, prog: str, *sections: str, **options: Any) -> None:
        super().__init__(prog, allow_abbrev=False, **options)
        for section in sections:
            self._add_flags(section)

    def error(self, message: str) -> NoReturn:
        _, unknown, words = message.partition("unrecognized arguments: ")
        flag = next((word.partition("=")[0] for word in words.split() if word.startswith("--")), "")
        closest = get_close_matches(flag, self._option_string_actions, n=1) if unknown and flag else []
        super().error(message + "".join(f" (did you mean {name}?)" for name in closest))

    def _add_flags(self, section: str) -> None:
        add = self.add_argument
        for names, given in _flags()[section].items():
            if given == "group":
                add = (self.add_argument_group(names) if names else self).add_argument
                continue
            settings = dict(given or _flags()["shared"][names])
            if "type" in settings:
                settings["type"] = _TYPES[settings["type"]]
            if ":" in str(settings.get("default", "")):
                settings["default"] = _named(settings["default"])
                settings["help"] = settings["help"].format(default=settings["default"])
            if "choices" in settings:
                settings["choices"] = [each for choice in settings["choices"] for each in _choices(choice)]
                if "help" in settings:
                    settings["help"] = settings["help"].replace("{choices}", ", ".join(map(str, settings["choices"])))
            # Else the words of a script are said to be missing where the script is.
            add(*names.split(), **settings).required &= settings.get("nargs") != REMAINDER


def parser_of(command: str) -> Parser:
    """Return the parser of a command: its words, flags and defaults."""
    words = dict(_flags()["commands"][command])
    sections, defaults = words.pop("sections"), words.pop("defaults", {})
    parser = Parser(words.pop("prog", f"tonnage {command}"), *sections, **words)
    parser.set_defaults(**defaults)
    return parser


def summary_of(command: str) -> str:
    """Return what a command does, in a sentence."""
    summary: str = _flags()["commands"][command]["description"]
    return summary


@cache
def _flags() -> dict[str, dict[str, Any]]:
    return json.loads(Path(__file__).with_name("flags.json").read_text("utf-8"))  # type: ignore[no-any-return]


def _choices(choice: str | int) -> Iterable[Any]:
    """Return the choice itself, or those of a Literal, a table or a function that it names."""
    if ":" not in str(choice):
        return [choice]
    named = _named(str(choice))
    return get_args(named) or (named() if callable(named) else named)


def _named(text: str) -> Any:
    module, _, name = text.partition(":")
    return getattr(import_module(f"tonnage.{module}"), name)


def _amount(text: str) -> float:
    try:
        return parse_amount(text)
    except BadSize as problem:
        raise ArgumentTypeError(f"{problem} {problem.hint}") from None


def redirection_of(options: Namespace) -> "Redirection":
    """Return where the script's files go, and warn where they are written in place."""
    from tonnage.virtual.redirect import Redirection

    redirection = Redirection(keep=options.keep, in_place=options.write)
    if options.write:
        sys.stderr.write(_WRITES_IN_PLACE)
    return redirection


def _version(text: str) -> str:
    if not re.fullmatch(r"[0-9]+\.[0-9]+(\..*)?", text):
        raise ArgumentTypeError(f"{text!r} is not a version of torch. Write it like 2.11.")
    return text


_TYPES = {"int": int, "float": float, "Path": Path, "amount": _amount, "version": _version}


def campaign_of(options: Namespace) -> "Campaign":
    """What the flags say."""
    from tonnage.report.step_time import Campaign

    return Campaign(tokens=options.tokens, samples=options.samples, epochs=options.epochs, price=options.price)


def page_of(options: Namespace) -> Path | None:
    """The file for the page, checked before any work is done for it."""
    if options.html is None and not options.open:
        return None
    from tonnage.report.output import page_target

    return page_target(options.html, opens=options.open, force=options.force)


def check_cards_named(options: Namespace) -> None:
    """A page and a launch are of some cards: refuse to make them of all."""
    asked = {"--export": options.export is not None, "--html": options.html is not None, "--open": options.open}
    for flag in (flag for flag, given in asked.items() if given and not options.gpus):
        hint = "Name the cards, like --gpus 8xh200; without, they are compared."
        raise RequestError(f"{flag} needs --gpus.", hint=hint)


def publish_holders(shape: "ModelShape", holders: "list[Holder]", options: Namespace, *, what: str, most: str) -> int:
    """Where no cards are named, print which hold the model, or write it as JSON; the exit status."""
    from tonnage.report.output import write_json
    from tonnage.report.plans.notes import holder_figures, holder_lines

    if options.json:
        write_json(options.json, holder_figures(shape, holders, most=most))
    if options.json != "-":
        sys.stdout.write("".join(f"{line}\n" for line in holder_lines(shape, holders, what=what, most=most)))
    return 0 if any(holder.most for holder in holders) else 1
