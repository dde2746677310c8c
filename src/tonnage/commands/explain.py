"""`tonnage explain`: why a recorded run ran out of memory, and what to do."""

import sys
from pathlib import Path

import typer


def explain(
    file: Path = typer.Argument(help="A recording, or a memory snapshot of PyTorch (.pickle, gzipped or not)."),
    rank: int = typer.Option(None, "--rank", min=0, help="Of a cluster's recording: this rank, not the worst."),
    json: str = typer.Option("", "--json", metavar="FILE", help="Write the answer as JSON ('-': standard output)."),
    html: Path = typer.Option(None, "--html", metavar="FILE", help="Write a page that opens offline."),
    opens: bool = typer.Option(False, "--open", help="Show the page in the browser."),
    force: bool = typer.Option(False, "--force", help="Replace the page that is there."),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Show every finding, line and fix."),
    run: bool = typer.Option(
        True, help="Of a virtual run, run its script with the changes that are flags or settings."
    ),
) -> None:
    """Why it ran out of memory, or what is wrong: the cause, the evidence in bytes, and ranked fixes."""
    from dataclasses import replace

    from tonnage.explain import diagnose
    from tonnage.explain.trial import tried
    from tonnage.recording import open_cluster, open_recording
    from tonnage.report.explain import explain_figures, print_diagnosis
    from tonnage.report.output import page_target, wants_report, write_json, write_page
    from tonnage.report.ranks import tell_rank

    page = page_target(html, opens=opens, force=force)
    recording, cluster = open_recording(file, rank), open_cluster(file)
    diagnosis = diagnose(recording)
    script = recording.header.script
    if script and recording.header.source != "snapshot" and not Path(script).is_file():  # a snapshot has names alone
        print(f"tonnage: there is no script at {Path(script).absolute()} any more:", file=sys.stderr)
        print("         its text is not read, and changes are computed, not run", file=sys.stderr)
    if cluster:
        tell_rank(cluster.summary, rank)
    elif run:  # the script of a cluster is none for one GPU
        fixes = tried(recording, diagnosis.fixes, lambda words: print(f"tonnage: {words}", file=sys.stderr))
        diagnosis = replace(diagnosis, fixes=fixes)
    if json:
        write_json(json, explain_figures(recording, diagnosis))
    if wants_report(json, page):
        print_diagnosis(recording, diagnosis, stream=sys.stdout, verbose=verbose)
    if page is not None:
        from tonnage.report.html import render_page

        write_page(page, render_page(recording, diagnosis=diagnosis), opens=opens, json_target=json)
