"""Torch's profiler, begun and ended by hand: what the operators between were called with, and marks of our own among them.

It was made for one process that measures time; here nothing runs on a card, and only its list of calls is wanted.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

from tonnage.clock.captured import CapturedStep
from tonnage.garbage import no_collection
from tonnage.script import streams
from tonnage.script.profiled import MARK, Profile, read_step

STEP = "step"
_watching: list[Callable[[], None]] = []  # how to stop it, while we profile


def is_on() -> bool:
    """Whether somebody profiles."""
    return bool(sys.modules["torch"]._C._autograd._profiler_enabled())


def begin(*, follows_nodes: bool = False) -> None:
    """From here on, calls of this thread and of the backward passes that it runs are noted.

    With `follows_nodes`, nodes of autograd say which operator made them.
    """
    torch = sys.modules["torch"]
    native = torch._C._profiler
    config = native.ProfilerConfig(
        native.ProfilerState.KINETO, True, False, False, False, False, native._ExperimentalConfig()
    )
    with _quiet():
        torch._C._autograd._prepare_profiler(config, {native.ProfilerActivity.CPU})
        # What a node of autograd runs says its name again in a scope of its own: as many events more.
        scopes = {native.RecordScope.FUNCTION, native.RecordScope.USER_SCOPE}
        scopes |= {native.RecordScope.BACKWARD_FUNCTION} if follows_nodes else set()
        torch._C._autograd._enable_profiler(config, {native.ProfilerActivity.CPU}, scopes)
    torch.autograd.profiler._run_on_profiler_start()
    _watching.append(streams.watch(torch, note))


def note(kind: str, name: str, *numbers: int) -> None:
    """A note about streams or collectives, where it is we who profile."""
    if _watching:
        mark(" ".join(map(str, (kind, name, *numbers))))


def mark(words: str) -> None:
    """An entry of ours among the calls."""
    with sys.modules["torch"]._C._profiler._RecordFunctionFast(MARK + words):
        pass


def end() -> Any:
    """What was noted, as torch has it."""
    torch = sys.modules["torch"]
    while _watching:
        _watching.pop()()
    with _quiet():
        results = torch._C._autograd._disable_profiler()
        torch.autograd.profiler._run_on_profiler_stop()
    return results


def calls_of(run: Callable[[], object]) -> CapturedStep:
    """What a function calls. Nobody else may profile meanwhile."""
    with no_collection():
        begin()
        try:
            mark(STEP)
            run()
            mark(STEP)
        finally:
            results = end()
        return read_step(Profile(results), 0, settings=settings())


def settings() -> dict[str, str]:
    """What the time of arithmetic depends on beside its operands."""
    torch = sys.modules["torch"]
    found: dict[str, str] = {}
    for name, owner in (("matmul_tf32", torch.backends.cuda.matmul), ("cudnn_tf32", torch.backends.cudnn)):
        try:
            found[name] = str(bool(owner.allow_tf32))
        except RuntimeError:  # a script that uses torch's newer settings may not be asked for the older
            found[name] = str(owner.fp32_precision == "tf32")
    return found | {"cudnn_benchmark": str(bool(torch.backends.cudnn.benchmark))}


class _quiet:
    """Silences the profiler's library, which says that it begins, and that it found no card to trace."""

    _NAME = "KINETO_LOG_LEVEL"

    def __enter__(self) -> None:
        self._before = os.environ.get(self._NAME)
        os.environ.setdefault(self._NAME, "99")

    def __exit__(self, *_: Any) -> None:
        if self._before is None:
            os.environ.pop(self._NAME, None)
