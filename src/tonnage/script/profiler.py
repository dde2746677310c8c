"""Starts and stops torch's profiler directly, with our own marks among the recorded calls.

Only the list of calls is used, not the times. Notes add what the profiler lacks: the current stream, and which stream
waits for what. They are taken from torch's Python; of native code only autograd's engine is tracked
(`profiled.BackwardStreams`). `clock.streams` interprets them.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tonnage.clock.captured import CapturedStep
from tonnage.garbage import no_collection
from tonnage.script.profiled import MARK, ProfilerResults, read_step
from tonnage.script.transforms import TransformTrace
from tonnage.script.wrapping import wrap

STEP = "step"
_LOG_LEVEL = "KINETO_LOG_LEVEL"
_watching: list[Callable[[], None]] = []  # how to stop it, while we profile
_transforms: list[TransformTrace] = []  # one while we profile


def _watch_streams(torch: Any) -> Callable[[], None]:
    """Start noting streams and events; the returned function undoes it."""
    cuda = torch.cuda

    def on(stream: Any) -> int:
        return int((cuda.current_stream() if stream is None else stream).stream_id)

    def after(act: Callable[..., None]) -> Callable[..., Any]:
        def call(plain: Any, /, *arguments: Any, **keywords: Any) -> Any:
            result = plain(*arguments, **keywords)
            act(*arguments, **keywords)
            return result

        return call

    undo = ExitStack()
    for owner, name, act in (
        (torch._C, "_cuda_setStream", lambda stream_id=0, *_, **__: note("stream", "set_stream", stream_id)),
        (cuda.Event, "record", lambda event, stream=None: note("stream", "record_event", id(event), on(stream))),
        (cuda.Event, "wait", lambda event, stream=None: note("stream", "wait_event", id(event), on(stream))),
        (cuda.Event, "synchronize", lambda event: note("stream", "synchronize_event", id(event))),
        (cuda.Stream, "synchronize", lambda stream: note("stream", "synchronize_stream", on(stream))),
        (cuda, "synchronize", lambda *_, **__: note("stream", "synchronize")),
    ):
        if hasattr(owner, name):
            wrap(undo, owner, name, after(act))
    return undo.close


def is_on() -> bool:
    """Whether any profiler is running."""
    return bool(sys.modules["torch"]._C._autograd._profiler_enabled())


def begin(*, follows_nodes: bool = False) -> None:
    """Start recording this thread's calls and backward passes; `follows_nodes` links autograd nodes to operators."""
    torch = sys.modules["torch"]
    native = torch._C._profiler
    config = native.ProfilerConfig(
        native.ProfilerState.KINETO, True, False, False, False, False, native._ExperimentalConfig()
    )
    with _quiet():
        torch._C._autograd._prepare_profiler(config, {native.ProfilerActivity.CPU})
        # Nodes of autograd repeat their name in this scope, which doubles the number of events.
        scopes = {native.RecordScope.FUNCTION, native.RecordScope.USER_SCOPE}
        scopes |= {native.RecordScope.BACKWARD_FUNCTION} if follows_nodes else set()
        torch._C._autograd._enable_profiler(config, {native.ProfilerActivity.CPU}, scopes)
    torch.autograd.profiler._run_on_profiler_start()
    _watching.append(_watch_streams(torch))
    _transforms.append(TransformTrace())


def note(kind: str, name: str, *numbers: int) -> None:
    """Add a note about streams or collectives, if we are profiling."""
    if _watching:
        mark(" ".join(map(str, (kind, name, *numbers))))


def mark(words: str) -> None:
    """Add our own entry among the calls."""
    with ExitStack() as paused:
        for trace in _transforms:
            paused.enter_context(trace.paused())
        with sys.modules["torch"]._C._profiler._RecordFunctionFast(MARK + words):
            pass


def end() -> ProfilerResults:
    """Stop the profiler and return what it recorded."""
    torch = sys.modules["torch"]
    while _watching:
        _watching.pop()()
    trace = _transforms.pop()
    trace.stop()
    with _quiet():
        results = torch._C._autograd._disable_profiler()
        torch.autograd.profiler._run_on_profiler_stop()
    return ProfilerResults(results, trace.read().events)


def calls_of(run: Callable[[], object]) -> CapturedStep:
    """Return what a function calls. No other profiler may run meanwhile."""
    with no_collection():
        begin()
        try:
            mark(STEP)
            run()
            mark(STEP)
        finally:
            results = end()
        return read_step(results, 0, settings=settings())


def settings() -> dict[str, str]:
    """Return the settings that affect the speed of arithmetic."""
    torch = sys.modules["torch"]
    found: dict[str, str] = {}
    for name, owner in (("matmul_tf32", torch.backends.cuda.matmul), ("cudnn_tf32", torch.backends.cudnn)):
        try:
            found[name] = str(bool(owner.allow_tf32))
        except RuntimeError:  # a script that uses torch's newer settings may not read the older ones
            found[name] = str(owner.fp32_precision == "tf32")
    return found | {"cudnn_benchmark": str(bool(torch.backends.cudnn.benchmark))}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Kineto's messages that it starts and found no GPU to trace."""
    is_ours = _LOG_LEVEL not in os.environ
    os.environ.setdefault(_LOG_LEVEL, "99")
    try:
        yield
    finally:
        if is_ours:
            os.environ.pop(_LOG_LEVEL, None)
