"""Where answers go: text to the terminal, data to a file or to standard output."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

from tonnage.errors import OutputExists, RequestError
from tonnage.results import results_in_place

if TYPE_CHECKING:
    from tonnage.explain.total import AllCards
    from tonnage.recording import Recording
    from tonnage.report.step_time import Campaign

STANDARD_OUTPUT = "-"


def publish(
    answers: "Sequence[Recording]",
    *,
    json_target: str = "",
    page: Path | None = None,
    opens: bool = False,
    verbose: bool = False,
    campaign: "Campaign | None" = None,
    cards: "AllCards | None" = None,
) -> None:
    """Publish one run's answers, one per GPU, as a report or the requested output; `cards` says which hold it."""
    from tonnage.explain import Advice, advice_for
    from tonnage.report.runs.terminal import figures_of, print_report
    from tonnage.report.runs.total import all_cards_figures
    from tonnage.report.step_time import NONE

    planned = campaign or NONE
    ran = max(answers, key=lambda answer: answer.header.capacity_bytes)
    # A GPU that holds the run needs no advice of its own, except the one it ran on.
    advice = [advice_for(answer) if answer is ran or answer.oom else Advice() for answer in answers]
    own = advice[answers.index(ran)]
    if json_target:
        write_json(json_target, figures_of(answers, advice, planned) | (all_cards_figures(cards) if cards else {}))
    if wants_report(json_target, page):
        print_report(answers, ran, own, stream=sys.stdout, verbose=verbose, campaign=planned, cards=cards)
    if page is not None:
        from tonnage.report.html import render_page

        write_page(page, render_page(ran, own, cards=cards), opens=opens, json_target=json_target)


def wants_report(json_target: str, page: Path | None) -> bool:
    """Say whether to print the report: not if JSON on standard output or a page was asked for."""
    return json_target != STANDARD_OUTPUT and page is None


def page_target(html: Path | None, *, opens: bool, force: bool) -> Path | None:
    """Return the page's file, checked before any work is done: the one named, or a temporary one for `--open`."""
    if html is not None:
        if html.exists() and not force:
            raise OutputExists(f"{html} exists already.", hint="Choose another name, or pass --force to replace it.")
        return html
    return Path(mkdtemp(prefix="tonnage-")) / "report.html" if opens else None


def write_page(path: Path, text: str, *, opens: bool = False, json_target: str = "") -> None:
    """Write a page, print where, and optionally open a browser."""
    write_text(path, text)
    stream = sys.stderr if json_target == STANDARD_OUTPUT else sys.stdout
    stream.write(f"wrote {path}\n")
    if opens:
        import webbrowser

        if not webbrowser.open(path.resolve().as_uri()):
            print("tonnage: no browser is known here: open that file in one.", file=sys.stderr)


def write_json(target: str, figures: dict[str, object]) -> None:
    """Write JSON to a file, or to standard output if the target is "-"."""
    text = json.dumps(figures, indent=1) + "\n"
    if target == STANDARD_OUTPUT:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    write_text(Path(target), text)


def write_text(path: Path, text: str) -> None:
    """Write text to a file. Unencodable characters (lone surrogates from a broken recording) become "?"."""
    try:
        with results_in_place():
            path.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        hint = "Name a file in a folder that exists."
        raise RequestError(f"Cannot write {path}: {error.strerror}.", hint=hint) from None
