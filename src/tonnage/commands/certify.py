"""`tonnage certify`: will the whole training survive on a card?"""

import os
import subprocess
import sys
from argparse import Namespace
from typing import TYPE_CHECKING

from tonnage.commands.options import parser_of, redirection_of
from tonnage.errors import RequestError
from tonnage.hardware import Gpu, find_cuda_gpu

if TYPE_CHECKING:
    from tonnage.certify.certificate import Certificate
    from tonnage.certify.running import TrainingResult
    from tonnage.script.launchers import LaunchCommand


def command(words: list[str]) -> int:
    """Parse the words after `tonnage certify`, walk through the training, report; the exit status."""
    from tonnage.report.streams import data_on_stdout
    from tonnage.script.assume import assume_lines
    from tonnage.script.launchers import read_launch

    options = parser_of("certify").parse_args(words)
    if options.epochs < 0 or options.steps < 0:
        raise RequestError("A number of epochs or steps is 1 or more.", hint="Leave it out to certify all of them.")
    gpu = find_cuda_gpu(options.gpu)
    launch = read_launch([options.script, *options.arguments], is_module=options.module, gpus=1)
    if launch.has_ranks:
        hint = "Certify the script itself on one card, and run the launcher's command with `tonnage run --gpus`."
        raise RequestError("certify walks through the training of one process, and this launches several.", hint=hint)
    os.environ.update(launch.environment)
    assume_lines(options.assume)
    with data_on_stdout(True):  # the script's own words, a line for each of many steps, go to standard error
        training = _run(options, launch, gpu)
    failed = training.ending.outcome in ("error", "depends")
    if training.replayed_parts and (failed or not training.is_faithful):
        # Begin again without replays: the script does something between its steps that replays would miss.
        why = training.ending.error or "the script works on gradients by itself"
        sys.stderr.write(f"tonnage: steps cannot be replayed ({why}); every one is run instead, which takes longer.\n")
        again = [sys.executable, "-m", "tonnage", "certify", "--every-step", *words]
        return subprocess.run(again, check=False).returncode
    ending = training.ending
    if not training.steps:
        if ending.outcome == "depends":
            return _tell_dependence(training)
        if ending.outcome != "ok":
            print(f"tonnage: the script failed before its first step: {ending.error}", file=sys.stderr)
            return ending.exit_status or 1
        problem = "The script trained nothing on the GPU: no model was called with gradients."
        raise RequestError(problem, hint="certify is for trainings; for anything else there is `tonnage run`.")
    from tonnage.allocator import AllocatorSettings
    from tonnage.certify.certificate import certify
    from tonnage.report.lines import print_lines
    from tonnage.report.output import write_json
    from tonnage.report.runs.certify import certificate_figures, certificate_lines

    settings = AllocatorSettings.from_environment(os.environ, training.torch_version)
    certificate = certify(training.program, gpu, settings)
    larger_card = _larger_card(certificate)
    if options.json:
        write_json(options.json, certificate_figures(certificate, training, larger_card))
    if options.json != "-":
        print_lines(certificate_lines(certificate, training, larger_card), sys.stdout)
    if ending.outcome == "depends":
        return _tell_dependence(training)
    if ending.outcome == "error" and ending.error:
        print(f"tonnage: the script failed: {ending.error}", file=sys.stderr)
        return ending.exit_status or 1
    return int(not certificate.survives)


def _run(options: Namespace, launch: "LaunchCommand", gpu: Gpu) -> "TrainingResult":
    from tonnage.certify.running import run_training
    from tonnage.report.runs.certify import StepProgress

    progress = StepProgress()
    try:
        return run_training(
            launch.program, list(launch.arguments), gpu=gpu, torch_version=options.torch, epochs=options.epochs,
            steps=options.steps, replays=not options.every_step, progress=progress, redirection=redirection_of(options),
        )  # fmt: skip
    finally:
        progress.wipe()


def _tell_dependence(training: "TrainingResult") -> int:
    """Say on what value the script depended; the exit status."""
    print(f"tonnage: the script {training.ending.error}", file=sys.stderr)
    if training.dependence:
        print(training.dependence.advice, file=sys.stderr)
    return training.ending.exit_status


def _larger_card(certificate: "Certificate") -> str:
    """The smallest known card that holds all of it, where this one does not and the script's own limit is not what is short."""
    if certificate.survives or certificate.own_limit_bytes is not None:
        return ""
    from tonnage.certify.certificate import certify
    from tonnage.hardware.catalogue import cuda_cards

    for card in cuda_cards(certificate.gpu.memory_bytes):
        if certify(certificate.program, card, certificate.settings).verdict == "safe":
            return card.key
    return ""
