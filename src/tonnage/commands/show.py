"""`tonnage show`: the report of a recording or of a PyTorch snapshot."""

from pathlib import Path

import typer


def show(
    file: Path = typer.Argument(help="A recording, or a memory snapshot of PyTorch (.pickle, gzipped or not)."),
    json: str = typer.Option("", "--json", metavar="FILE", help="Write the figures as JSON ('-': standard output)."),
    html: Path = typer.Option(None, "--html", metavar="FILE", help="Write a page that opens offline."),
    force: bool = typer.Option(False, "--force", help="Replace the page that is there."),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Show every stand-in, assumption and step."),
) -> None:
    """Where the memory of a recorded run went."""
    from tonnage.recording import open_recording
    from tonnage.report.output import check_free, publish

    if html is not None:
        check_free(html, force=force)
    recording = open_recording(file)
    publish([recording], json_target=json, page=html, verbose=verbose)
