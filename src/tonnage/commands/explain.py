"""`tonnage explain`: why a run ran out of memory, by its recording or by the text of its error, and what to do."""

import sys
from pathlib import Path

import typer

from tonnage.errors import RequestError


def explain(
    file: Path = typer.Argument(
        None, help="A recording, a memory snapshot of PyTorch, or the text of an error or log ('-': standard input)."
    ),
    pasted: bool = typer.Option(False, "--clipboard", help="Explain the error that was copied to the clipboard."),
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

    from tonnage.explain.text.sources import is_text

    if file is None or pasted or str(file) == "-" or is_text(file):
        if html or opens or rank is not None:
            raise RequestError("A text has no page and no ranks.", hint="Leave out --html, --open and --rank.")
        _explain_text(file, pasted=pasted, json=json, verbose=verbose)
        return

    from tonnage.explain import diagnose
    from tonnage.explain.trial import tried
    from tonnage.recording import open_cluster, open_recording
    from tonnage.report.lines import print_sections
    from tonnage.report.output import page_target, wants_report, write_json, write_page
    from tonnage.report.runs.explain import diagnosis_sections, explain_figures
    from tonnage.report.runs.ranks import tell_rank

    page = page_target(html, opens=opens, force=force)
    recording, cluster = open_recording(file, rank), open_cluster(file)
    diagnosis = diagnose(recording, cluster.summary if cluster else None)
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
        print_sections(diagnosis_sections(recording, diagnosis, verbose=verbose), sys.stdout)
    if page is not None:
        from tonnage.report.html import render_page

        write_page(page, render_page(recording, diagnosis=diagnosis), opens=opens, json_target=json)


def _explain_text(file: Path | None, *, pasted: bool, json: str, verbose: bool) -> None:
    """The same of an error's text: from the clipboard, standard input or a file."""
    from contextlib import closing

    from tonnage.explain.text import explain_text, text_lines
    from tonnage.explain.text.sources import clipboard, standard_input
    from tonnage.report.output import wants_report, write_json
    from tonnage.report.runs.explain import print_text_diagnosis, text_figures
    from tonnage.untrusted import open_file

    if pasted and file is not None:
        raise RequestError("Either a file or the clipboard is explained.", hint="Leave out one of them.")
    if pasted:
        name, stream = "clipboard", clipboard()
    elif file is None:
        raise RequestError(
            "There is nothing to explain.",
            hint="Name a recording, a snapshot or the text of an error; '-' is standard input, --clipboard what was copied.",
        )
    elif str(file) == "-":
        name, stream = "standard input", standard_input()
    else:
        name, stream = file.name, open_file(file)
    with closing(stream):
        found = explain_text(text_lines(stream))
    if json:
        write_json(json, text_figures(found))
    if wants_report(json, None):
        print_text_diagnosis(name, found, stream=sys.stdout, verbose=verbose)
