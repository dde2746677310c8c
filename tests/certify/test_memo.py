"""A training of which known steps are replayed takes and drops the same blocks as one whose every step is run."""

import contextlib
import io
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tonnage.allocator import AllocatorSettings
from tonnage.certify.replay import live_through
from tonnage.certify.running import run_training
from tonnage.hardware import find_cuda_gpu
from tonnage.script.running import Program
from tonnage.virtual.builds import preload

SCRIPT = Path(__file__).parent / "scripts" / "lengths.py"


def trained(replays: bool, words: str) -> list[Any]:
    """What became of the script, run in a fork of this process, which has loaded torch."""
    preload()
    fork = get_context("fork")
    reader, writer = fork.Pipe(duplex=False)
    child = fork.Process(target=_train, args=(replays, words.split(), writer))
    child.start()
    writer.close()
    with reader:
        found: list[Any] = reader.recv()
    child.join()
    return found


def _train(replays: bool, words: list[str], told: Connection) -> None:
    import torch

    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    gpu = find_cuda_gpu("h200")
    with contextlib.redirect_stdout(io.StringIO()):
        done = run_training(Program.of_file(SCRIPT), words, gpu=gpu, replays=replays)
    lived = live_through(done.program, gpu.memory_bytes, AllocatorSettings())
    kinds = [part.kind for part in done.program.parts]
    peaks = [lived.allocated_bytes, lived.reserved_bytes]
    told.send(
        [done.ending.error, done.steps, done.replayed_parts, done.is_faithful, lived.unknown_frees, *peaks, kinds]
    )


@pytest.mark.parametrize("words", ["", "--accumulate 2 --precision fp16", "--leak"])
def test_replays_change_nothing(words: str) -> None:
    error, steps, none_replayed, *whole = trained(False, f"--steps 20 {words}")
    again, same_steps, replayed, *found = trained(True, f"--steps 20 {words}")
    assert not error and not again and none_replayed == 0
    assert same_steps == steps and replayed > 8
    assert found == whole and found[0] is True and found[1] == 0


def test_gradients_that_the_script_handles_itself_get_tensors() -> None:
    _, _, _, _, *whole = trained(False, "--steps 20 --by-hand")
    error, _, replayed, faithful, *found = trained(True, "--steps 20 --by-hand")
    assert not error and replayed and faithful and found == whole


def test_a_script_that_only_looks_at_gradients_is_noticed() -> None:
    _, _, replayed, faithful, *_ = trained(True, "--steps 24 --watch-gradients")
    assert replayed and not faithful
