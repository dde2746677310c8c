"""`tonnage run`: an unmodified script on a GPU that is not there.

Its words are parsed by argparse, unlike those of the other commands: typer, with pydantic behind it, takes a fifth of a
second to load, and here a script waits for it. The reporter is loaded after the run for the same reason.
"""

import sys
from argparse import REMAINDER, ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from tonnage.commands.pages import add_page_options, page_of
from tonnage.errors import OutputExists, ScriptNotFound
from tonnage.hardware import Gpu, find_cuda_gpu
from tonnage.hardware.cluster import find_cuda_cluster

if TYPE_CHECKING:
    from tonnage.recording import Recording

SUMMARY = "Run a script on a GPU that is not there, and report what it would allocate."
_EXIT_STATUS = (
    "Exits with the script's own status where it failed for its own reasons, 1 where it does not fit, else 0."
)


def command(words: list[str]) -> int:
    """Parse the words after `tonnage run`, run, report; the exit status."""
    parser = _parser()
    options = parser.parse_args(words)
    if bool(options.gpu) == bool(options.gpus):
        parser.error("name the card with --gpu, or a cluster of them with --gpus")
    if options.gpus:
        return _on_cluster(options)
    cards = list(dict.fromkeys(find_cuda_gpu(name) for name in options.gpu.split(",")))
    check_paths(options)
    page = page_of(options)

    from tonnage.report.streams import data_on_stdout

    with data_on_stdout(options.json == "-"):
        recording = _record(options, max(cards, key=lambda card: card.memory_bytes))
    answers = _answers(recording, cards)
    _keep(recording, answers, options, page)
    return _exit_status(answers)


def _parser() -> ArgumentParser:
    usage = "tonnage run --gpu NAME[,NAME] | --gpus NxNAME [OPTION]... SCRIPT [ARG]..."
    parser = ArgumentParser("tonnage run", usage=usage, description=SUMMARY, epilog=_EXIT_STATUS, allow_abbrev=False)
    add = parser.add_argument
    add("--gpu", default="", metavar="NAME[,NAME]", help="the card to run on, or several to compare")
    add("--gpus", default="", metavar="NxNAME", help="a cluster for a torchrun script: 8xh200, or 64x8xh100")
    add("--torch", metavar="VERSION", help="the torch whose kernels are modelled (default: the installed one)")
    add("-o", "--output", type=Path, metavar="FILE", help="keep the recording for `tonnage show`")
    add("--force", action="store_true", help="replace files that are there")
    add("--json", default="", metavar="FILE", help="write the figures as JSON ('-': standard output)")
    add_page_options(parser)
    add("-v", "--verbose", action="store_true", help="show every step, stand-in and assumption")
    add("script", type=Path, metavar="SCRIPT", help="the Python script to run, as it is")
    add("arguments", nargs=REMAINDER, metavar="ARG", help="the script's own words, untouched")
    return parser


def check_paths(options: Namespace) -> None:
    """Before the run, so that no one waits for a mistake."""
    script, output = options.script, options.output
    if not script.is_file():
        found = "a folder" if script.is_dir() else "nothing"
        raise ScriptNotFound(f"There is no script at {script}: found {found}.", hint="Name a Python file to run.")
    if output and output.exists() and not options.force:
        raise OutputExists(f"{output} exists already.", hint="Choose another name, or pass --force to replace it.")


def _record(options: Namespace, card: Gpu) -> "Recording":
    from tonnage.report.progress import live_progress
    from tonnage.virtual import run_script

    with live_progress(card.memory_bytes) as progress:
        return run_script(options.script, options.arguments, gpu=card, torch_version=options.torch, progress=progress)


def _on_cluster(options: Namespace) -> int:
    """The same on many cards: every distinct rank, and the one that needs most in full."""
    cards = find_cuda_cluster(options.gpus)
    check_paths(options)
    page = page_of(options)
    from tonnage.recording import write_cluster
    from tonnage.report.ranks import publish_ranks, tell_round
    from tonnage.report.streams import data_on_stdout
    from tonnage.virtual.cluster import recorded, run_cluster

    with data_on_stdout(options.json == "-"):
        run = run_cluster(options.script, options.arguments, cards, torch_version=options.torch, progress=tell_round)
        sys.stderr.write(run.errors)
    cluster = recorded(run)
    if options.output:
        write_cluster(options.output, cluster, force=options.force)
    publish_ranks(cluster, json_target=options.json, page=page, opens=options.open, verbose=options.verbose)
    return run.exit_status


def _answers(recording: "Recording", cards: list[Gpu]) -> "list[Recording]":
    """One for each card: the run itself where it ran, a replay of it elsewhere."""
    if [card.key for card in cards] == [recording.header.gpu]:
        return [recording]
    from tonnage.recording.replay import replay_on

    return [recording if card.key == recording.header.gpu else replay_on(recording, card) for card in cards]


def _keep(recording: "Recording", answers: "list[Recording]", options: Namespace, page: Path | None) -> None:
    from tonnage.recording import write_recording
    from tonnage.report.output import publish

    if options.output:
        write_recording(options.output, recording, force=options.force)
    publish(answers, json_target=options.json, page=page, opens=options.open, verbose=options.verbose)


def _exit_status(answers: "list[Recording]") -> int:
    """The script's own where it failed for its own reasons, 1 where a card does not hold it, else 0."""
    if any(answer.header.outcome == "error" for answer in answers):
        return answers[0].header.exit_status or 1
    return int(any(answer.fits is False for answer in answers))
