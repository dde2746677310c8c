"""`tonnage show`: the report of a recording or of a PyTorch snapshot."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from tonnage.explain.total import AllCards
    from tonnage.recording import Recording


def show(
    file: Path = typer.Argument(help="A recording, or a memory snapshot of PyTorch (.pickle, gzipped or not)."),
    json: str = typer.Option("", "--json", metavar="FILE", help="Write the figures as JSON ('-': standard output)."),
    html: Path = typer.Option(None, "--html", metavar="FILE", help="Write a page that opens offline."),
    opens: bool = typer.Option(False, "--open", help="Show the page in the browser."),
    gpu: str = typer.Option("", "--gpu", metavar="NAME", help="Answer for this card, several, or all that there are."),
    rank: int = typer.Option(None, "--rank", min=0, help="Of a cluster's recording: this rank alone, in full."),
    force: bool = typer.Option(False, "--force", help="Replace the page that is there."),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Show every stand-in, assumption and step."),
) -> None:
    """Where the memory of a recorded run went; of a cluster's, all ranks side by side."""
    from tonnage.recording import open_cluster, open_recording
    from tonnage.report.output import page_target, publish

    page = page_target(html, opens=opens, force=force)
    cluster = open_cluster(file)
    if gpu:
        answers, cards = _on_cards(file, gpu, rank)
    elif cluster is not None and rank is None:
        from tonnage.report.runs.ranks import publish_ranks

        publish_ranks(cluster, json_target=json, page=page, opens=opens, verbose=verbose)
        return
    else:
        answers, cards = [open_recording(file, rank)], None
        if cluster is not None:
            from tonnage.report.runs.ranks import tell_rank

            tell_rank(cluster.summary, rank)
    publish(answers, json_target=json, page=page, opens=opens, verbose=verbose, cards=cards)


def _on_cards(file: Path, names: str, rank: int | None) -> "tuple[list[Recording], AllCards | None]":
    """The run replayed on other cards: in full on those named, in a table of all."""
    from tonnage.errors import RequestError
    from tonnage.explain.total import on_all_cards
    from tonnage.hardware import find_cuda_gpu
    from tonnage.recording import open_recording
    from tonnage.recording.replay import replay_on

    recording = open_recording(file, rank)
    if recording.oom is not None and recording.whole is None:
        problem = f"{file} ends where its run ran out of memory: what other cards would need is not known."
        raise RequestError(problem, hint="Run it again on a card without a limit: tonnage run --gpu all SCRIPT")
    if names == "all":
        return [recording], on_all_cards(recording)
    cards = dict.fromkeys(map(find_cuda_gpu, filter(None, names.split(","))))
    if not cards:
        raise RequestError(f"--gpu {names} names no card.", hint="Name one of: tonnage gpu")
    return [replay_on(recording, card) for card in cards], None
