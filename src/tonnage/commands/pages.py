"""Options that commands which write a page have in common, for those that parse their words with argparse."""

from argparse import ArgumentParser, Namespace
from pathlib import Path


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
