"""Runs scripts on virtual GPUs, each in a fork of one process that has loaded torch and the libraries."""

import contextlib
import importlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORKS = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Peaks:
    """How a virtual run ended, and its peaks in bytes on a card without a limit."""

    outcome: str  # of the run under the card's limit: "ok", "oom" or "error"
    allocated: int = 0
    reserved: int = 0
    process: int = 0
    error: str = ""
    seconds: float = 0.0


def preload(*modules: str) -> None:
    """Load torch and the libraries once, for every fork that follows."""
    from tonnage.virtual.builds import preload as load_torch

    load_torch()
    for module in modules:
        importlib.import_module(module)


def run(
    script: Path,
    words: Sequence[str],
    gpu: str,
    torch: str | None = None,
    timeout_s: float = 300,
    first_path: Path | None = None,
    **environment: str,
) -> Peaks:
    """The peaks of a script on a card of the catalogue. A run that dies goes on without the limit.

    Libraries are looked for in `first_path` first, where they are not loaded yet.
    """
    began = time.perf_counter()
    found = in_fork(_recorded, script, list(words), gpu, torch, first_path, environment, timeout_s=timeout_s)
    if isinstance(found, str):
        found = Peaks("error", error=found)
    return Peaks(**(vars(found) | {"seconds": time.perf_counter() - began}))


def in_fork(function: Callable[..., Any], *arguments: Any, timeout_s: float = 300) -> Any:
    """What a function returns in a fork of its own, silent; a word in place of it where there is nothing."""
    ours, theirs = FORKS.Pipe(duplex=False)
    child = FORKS.Process(target=_in_child, args=(theirs, function, arguments))
    child.start()
    theirs.close()
    found = "took too long"
    if ours.poll(timeout_s):
        try:
            found = ours.recv()
        except EOFError:
            found = "the process died"
    child.kill()
    child.join()
    return found


def _in_child(pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        found = function(*arguments)
    pipe.send(found)


def _recorded(
    script: Path, words: list[str], gpu: str, torch: str | None, first_path: Path | None, environment: dict[str, str]
) -> Peaks:
    os.environ |= environment
    if first_path:
        sys.path.insert(0, str(first_path))
    from tonnage.hardware import find_cuda_gpu
    from tonnage.virtual.redirect import Redirection
    from tonnage.virtual.script import run_script

    # Some scripts write what they read from the card to a file.
    in_place = Redirection(in_place=True)
    card = find_cuda_gpu(gpu)
    return peaks_of(run_script(script, words, gpu=card, torch_version=torch, timed=False, redirection=in_place))


def peaks_of(recording: Any) -> Peaks:
    """The peaks of the whole run; `outcome` is that of the part which the card saw."""
    whole = recording.whole or recording
    peaks = whole.peak_allocated_bytes, whole.peak_reserved_bytes, whole.peak_process_bytes
    return Peaks(recording.header.outcome, *peaks, whole.header.error)
