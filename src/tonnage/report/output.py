"""Where answers go: words to the terminal, data to a file or to standard output. It does not know their contents."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tonnage.errors import OutputExists, RequestError
from tonnage.recording import Recording

STANDARD_OUTPUT = "-"


def publish(
    answers: Sequence[Recording], *, json_target: str = "", page: Path | None = None, verbose: bool = False
) -> None:
    """One run's answers, a card each: a report for people and, where asked for, figures for programs and a page."""
    from tonnage.explain import Advice, advice_for
    from tonnage.report.figures import figures_of
    from tonnage.report.terminal import print_report

    ran = max(answers, key=lambda answer: answer.header.capacity_bytes)
    # A card that holds the run needs no advice of its own: it is that of the card that ran.
    advice = [advice_for(answer) if answer is ran or answer.oom else Advice() for answer in answers]
    if json_target:
        write_json(json_target, figures_of(answers, advice))
    words = sys.stderr if json_target == STANDARD_OUTPUT else sys.stdout
    print_report(answers, ran, advice[answers.index(ran)], stream=words, verbose=verbose)
    if page is not None:
        from tonnage.report.html import render_page

        write_text(page, render_page(ran, advice[answers.index(ran)]))
        words.write(f"  wrote {page}\n\n")


def write_json(target: str, figures: dict[str, object]) -> None:
    """Figures to a file, or to standard output where the target is "-"."""
    text = json.dumps(figures, indent=1) + "\n"
    if target == STANDARD_OUTPUT:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    write_text(Path(target), text)


def write_text(path: Path, text: str) -> None:
    """A text to a file. What no encoding has a place for (half a character, from a broken recording) becomes "?"."""
    try:
        path.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise RequestError(
            f"Cannot write {path}: {error.strerror}.", hint="Name a file in a folder that exists."
        ) from None


def check_free(path: Path, *, force: bool) -> None:
    """Refuse to overwrite a file, before any work is done for it."""
    if path.exists() and not force:
        raise OutputExists(f"{path} exists already.", hint="Choose another name, or pass --force to replace it.")
