"""`tonnage show`: the report of a recording."""

from pathlib import Path

import typer


def show(
    file: Path = typer.Argument(help="A recording, as `tonnage run -o FILE` writes it."),
    json: str = typer.Option("", "--json", metavar="FILE", help="Write the figures as JSON ('-': standard output)."),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Show every stand-in, assumption and step."),
) -> None:
    """Where the memory of a recorded run went."""
    from tonnage.recording import read_recording
    from tonnage.report.output import publish

    recording = read_recording(file)
    publish([recording], json_target=json, verbose=verbose)
