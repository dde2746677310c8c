"""`tonnage show`: the report of a recording or of a PyTorch snapshot."""

from pathlib import Path

import typer


def show(
    file: Path = typer.Argument(help="A recording, or a memory snapshot of PyTorch (.pickle, gzipped or not)."),
    json: str = typer.Option("", "--json", metavar="FILE", help="Write the figures as JSON ('-': standard output)."),
    html: Path = typer.Option(None, "--html", metavar="FILE", help="Write a page that opens offline."),
    opens: bool = typer.Option(False, "--open", help="Show the page in the browser."),
    rank: int = typer.Option(None, "--rank", min=0, help="Of a cluster's recording: this rank alone, in full."),
    force: bool = typer.Option(False, "--force", help="Replace the page that is there."),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Show every stand-in, assumption and step."),
) -> None:
    """Where the memory of a recorded run went; of a cluster's, all ranks side by side."""
    from tonnage.recording import open_cluster, open_recording
    from tonnage.report.output import page_target, publish

    page = page_target(html, opens=opens, force=force)
    cluster = open_cluster(file)
    if cluster is None:
        publish([open_recording(file, rank)], json_target=json, page=page, opens=opens, verbose=verbose)
        return
    from tonnage.report.ranks import publish_ranks, tell_rank

    if rank is None:
        publish_ranks(cluster, json_target=json, page=page, opens=opens, verbose=verbose)
        return
    recording = open_recording(file, rank)
    tell_rank(cluster.summary, rank)
    publish([recording], json_target=json, page=page, opens=opens, verbose=verbose)
