"""`tonnage diff`: what grew from one recorded run to another."""

import sys
from pathlib import Path

import typer


def diff(
    before: Path = typer.Argument(metavar="A", help="A recording or a snapshot of PyTorch."),
    after: Path = typer.Argument(metavar="B", help="Another, virtual or measured."),
    fail_above: str = typer.Option(
        "", "--fail-above", metavar="SIZE|PERCENT", help="Exit 1 where a peak grew by more: 512MiB, 5%."
    ),
    rows: int = typer.Option(8, "--rows", min=1, help="Lines of each table."),
    json: str = typer.Option("", "--json", metavar="FILE", help="Write the figures as JSON ('-': standard output)."),
) -> None:
    """What grew from A to B, by category, module and source line. Exits 1 past --fail-above."""
    from tonnage.explain.diff import GrowthLimit, compare, passes
    from tonnage.recording import open_recording
    from tonnage.report.diff import diff_figures, print_difference
    from tonnage.report.output import write_json

    limit = GrowthLimit.parse(fail_above) if fail_above else None
    runs = (open_recording(before), open_recording(after))
    difference = compare(*runs)
    failed = limit is not None and passes(difference, limit)
    if json:
        write_json(json, diff_figures((before.name, after.name), runs, difference, limit, failed))
    words = sys.stderr if json == "-" else sys.stdout
    print_difference((before.name, after.name), runs, difference, limit, failed, stream=words, rows=rows)
    raise typer.Exit(int(failed))
