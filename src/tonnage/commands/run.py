"""`tonnage run`: an unmodified script on a GPU that is not there.

Its words are parsed by argparse, unlike those of the other commands: typer, with pydantic behind it, takes a fifth of a
second to load, and here a script waits for it. The reporter is loaded after the run for the same reason.
"""

import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.commands.options import campaign_of, page_of, parser_of, redirection_of
from tonnage.errors import OutputExists, RequestError
from tonnage.hardware import Gpu, find_cuda_gpu
from tonnage.hardware.cluster import Cluster, find_cuda_cluster

if TYPE_CHECKING:
    from tonnage.recording import Recording
    from tonnage.script.launchers import LaunchCommand

ALL_CARDS = "all"


def command(words: list[str]) -> int:
    """Parse the words after `tonnage run`, run, report; the exit status."""
    from tonnage.script.assume import assume_lines

    parser = parser_of("run")
    options = parser.parse_args(words)
    if not options.gpu + options.gpus and any(word.startswith("--gpu") for word in options.arguments):
        parser.error("what follows SCRIPT is the script's own: name the card with --gpu before it")
    if bool(options.gpu) == bool(options.gpus):
        parser.error("name the card with --gpu, or a cluster of them with --gpus")
    names = options.gpu.split(",")
    on_all = options.gpu == ALL_CARDS
    cards = [] if on_all else list(dict.fromkeys(map(find_cuda_gpu, filter(None, names))))
    if options.gpu and not cards and not on_all:
        parser.error(f"--gpu {options.gpu} names no card")
    cluster = find_cuda_cluster(options.gpus) if options.gpus else None
    page = page_of(options)
    assume_lines(options.assume)
    launch = read(options, gpus=cluster.gpus_per_host if cluster else 1)
    if launch.has_ranks:
        if len(cards) > 1 or on_all:
            parser.error("name one card with --gpu: a launcher's processes run on cards of one kind")
        return _on_cluster(options, launch, launch.cluster(names[0], cluster), page)
    if cluster:
        return _on_cluster(options, launch, cluster, page)

    from tonnage.report.streams import data_on_stdout

    if on_all:
        return _on_all_cards(options, launch, page)
    with data_on_stdout(options.json == "-"):
        recording = _record(options, launch, max(cards, key=lambda card: card.memory_bytes))
    # One answer for each card: the run itself where it ran, a replay of it elsewhere.
    from tonnage.recording.replay import replay_on

    answers = [recording if card.key == recording.header.gpu else replay_on(recording, card) for card in cards]
    keep(recording, answers, options, page, campaign=campaign_of(options))
    # The script's own where it failed for its own reasons, 3 where it ended by an unknown value, 1 where a card does not
    # hold it, else 0.
    if any(answer.header.outcome in ("error", "depends") for answer in answers):
        return answers[0].header.exit_status or 1
    return int(any(answer.fits is False for answer in answers))


def read(options: Namespace, *, gpus: int = 1) -> "LaunchCommand":
    """What is to run, and whether the recording can be kept: before the run, so that no one waits for a mistake."""
    from tonnage.script.launchers import read_launch

    output = options.output
    for path in filter(None, (output, options.html, Path(options.json) if options.json.strip("-") else None)):
        folder = path.parent
        if path.is_dir():
            why = "it is a folder"
        elif not folder.is_dir():
            why = f"there is no folder {folder}"
        elif not path.exists() and not os.access(folder, os.W_OK | os.X_OK):
            why = f"the folder {folder} is not yours to write to"
        else:
            continue
        raise RequestError(f"Cannot write {path}: {why}.", hint="Name a file in a folder that you can write to.")
    if output and output.exists() and not options.force:
        from tonnage.recording import ended_in_error

        if not ended_in_error(output):
            raise OutputExists(f"{output} exists already.", hint="Choose another name, or pass --force to replace it.")
        options.force = True  # a run that failed is no answer: the next try may take its place
    launch = read_launch([options.script, *options.arguments], is_module=options.module, gpus=gpus)
    os.environ.update(launch.environment)
    return launch


def _record(options: Namespace, launch: "LaunchCommand", card: Gpu, *, unlimited: bool = False) -> "Recording":
    from tonnage.report.progress import live_progress
    from tonnage.virtual import run_script

    with live_progress(card.memory_bytes) as progress:
        recording = run_script(
            launch.program, list(launch.arguments), gpu=card, torch_version=options.torch, progress=progress,
            unlimited=unlimited, redirection=redirection_of(options),
        )  # fmt: skip
    tell_unused_assumptions()
    return recording


def tell_unused_assumptions() -> None:
    """Name the lines of `--assume` at which nothing was read that it could apply to."""
    from tonnage.script.assume import unused_lines

    for line in unused_lines():
        print(f"tonnage: --assume {line}: no unknown value was read there", file=sys.stderr)


def _on_all_cards(options: Namespace, launch: "LaunchCommand", page: Path | None) -> int:
    """One run without a limit, and which cards of the catalogue hold it."""
    from tonnage.explain.total import MEASURED_CARD, on_all_cards
    from tonnage.recording.replay import as_its_card_saw_it
    from tonnage.report.streams import data_on_stdout

    with data_on_stdout(options.json == "-"):
        recording = _record(options, launch, find_cuda_gpu(MEASURED_CARD), unlimited=True)
    cards = on_all_cards(recording)
    recording = as_its_card_saw_it(recording)
    keep(recording, [recording], options, page, campaign=campaign_of(options), cards=cards)
    if recording.header.outcome in ("error", "depends"):
        return recording.header.exit_status or 1
    return int(cards.smallest is None)


def _on_cluster(options: Namespace, launch: "LaunchCommand", cards: Cluster, page: Path | None) -> int:
    """The same on many cards: every distinct rank, and the one that needs most in full."""
    from tonnage.recording import write_cluster
    from tonnage.report.runs.ranks import publish_ranks, tell_round
    from tonnage.report.streams import data_on_stdout
    from tonnage.virtual.cluster import run_cluster

    with data_on_stdout(options.json == "-"):
        cluster = run_cluster(
            launch.program, launch.arguments, cards, torch_version=options.torch, progress=tell_round,
            redirection=redirection_of(options),
        )  # fmt: skip
    if options.output:
        write_cluster(options.output, cluster, force=options.force)
        tell_failed(cluster.summary.outcome, options)
    publish_ranks(cluster, json_target=options.json, page=page, opens=options.open, verbose=options.verbose)
    return cluster.summary.exit_status


def keep(
    recording: "Recording", answers: "list[Recording]", options: Namespace, page: Path | None, **more: Any
) -> None:
    """Write the recording where it was asked for, and publish the answers."""
    from tonnage.recording import write_recording
    from tonnage.report.output import publish

    if options.output:
        write_recording(options.output, recording, force=options.force)
        tell_failed(recording.header.outcome, options)
    publish(answers, json_target=options.json, page=page, opens=options.open, verbose=options.verbose, **more)


def tell_failed(outcome: str, options: Namespace) -> None:
    """Of a run that failed for reasons of its own, what becomes of the file that it left."""
    if outcome in ("error", "depends"):
        print(f"tonnage: {options.output} holds the run that failed, and the next one may replace it.", file=sys.stderr)
