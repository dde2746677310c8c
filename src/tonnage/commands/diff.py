"""`tonnage diff`: what grew from one recorded run to another."""

import sys
from pathlib import Path

import typer

from tonnage.errors import RequestError
from tonnage.untrusted import printable


def diff(
    before: Path = typer.Argument(metavar="A", help="A recording or a snapshot of PyTorch."),
    after: Path = typer.Argument(metavar="B", help="Another, virtual or measured."),
    fail_above: str = typer.Option(
        "", "--fail-above", metavar="SIZE|PERCENT", help="Exit 1 where a peak grew by more: 512MiB, 5%."
    ),
    ranks: str = typer.Option(
        "", "--ranks", metavar="A,B", help="Of clusters' recordings: these ranks, not the worst."
    ),
    rows: int = typer.Option(8, "--rows", min=1, help="Lines of each table."),
    json: str = typer.Option("", "--json", metavar="FILE", help="Write the figures as JSON ('-': standard output)."),
    markdown: str = typer.Option(
        "", "--markdown", metavar="FILE", help="Write tables for a pull request ('-': standard output)."
    ),
    html: Path = typer.Option(None, "--html", metavar="FILE", help="Write a page that opens offline."),
    opens: bool = typer.Option(False, "--open", help="Show the page in the browser."),
    force: bool = typer.Option(False, "--force", help="Replace the page that is there."),
) -> None:
    """What grew from A to B, by category, module and source line. Exits 1 past --fail-above."""
    from tonnage.explain.diff import GrowthLimit, compare, passes
    from tonnage.recording import open_recording
    from tonnage.report.output import page_target, wants_report, write_json, write_page, write_text
    from tonnage.report.runs.diff import ComparedRuns, diff_figures, markdown_difference, print_difference

    page = page_target(html, opens=opens, force=force)
    limit = GrowthLimit.parse(fail_above) if fail_above else None
    # "3,7", or one for both.
    numbers = ranks.split(",") if ranks else []
    if len(numbers) > 2 or not all(number.strip().isdecimal() for number in numbers):
        raise RequestError(f"{ranks!r} names no ranks.", hint="Write it like --ranks 3,7, or --ranks 3 for both files.")
    chosen = (int(numbers[0]), int(numbers[-1])) if numbers else (None, None)
    runs = (open_recording(before, chosen[0]), open_recording(after, chosen[1]))
    names = (_name(before, chosen[0]), _name(after, chosen[1]))
    difference = compare(*runs)
    failed = limit is not None and passes(difference, limit)
    compared = ComparedRuns(names, runs, difference, limit, failed)
    if json:
        write_json(json, diff_figures(compared))
    if markdown:
        text = markdown_difference(compared, rows=rows)
        sys.stdout.write(text) if markdown == "-" else write_text(Path(markdown), text)
    if wants_report(json, page) and markdown != "-":
        print_difference(compared, stream=sys.stdout, rows=rows)
    if page is not None:
        from tonnage.report.html.diff_page import render_diff_page

        write_page(page, render_diff_page(compared), opens=opens, json_target=json)
    raise typer.Exit(int(failed))


def _name(file: Path, rank: int | None) -> str:
    name = printable(file.name)
    return name if rank is None else f"{name} rank {rank}"
