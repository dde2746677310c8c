"""Adds notes to the profiler's calls that it lacks: the current stream, and which stream waits for what.

They are taken from torch's Python; of native code only autograd's engine is tracked (`notes.BackwardStreams`).
`clock.streams` interprets them.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any


def watch(torch: Any, note: Callable[..., None]) -> Callable[[], None]:
    """Start noting streams and events; the returned function undoes it."""
    cuda = torch.cuda
    undo: list[Callable[[], None]] = []

    def on(stream: Any) -> int:
        return int((cuda.current_stream() if stream is None else stream).stream_id)

    def after(owner: Any, name: str, act: Callable[..., None]) -> None:
        plain = getattr(owner, name, None)
        if plain is None:
            return

        @wraps(plain)
        def call(*arguments: Any, **keywords: Any) -> Any:
            result = plain(*arguments, **keywords)
            act(*arguments, **keywords)
            return result

        setattr(owner, name, call)
        undo.append(lambda: setattr(owner, name, plain))

    after(torch._C, "_cuda_setStream", lambda stream_id=0, *_, **__: note("stream", "set_stream", stream_id))
    after(cuda.Event, "record", lambda event, stream=None: note("stream", "record_event", id(event), on(stream)))
    after(cuda.Event, "wait", lambda event, stream=None: note("stream", "wait_event", id(event), on(stream)))
    after(cuda.Event, "synchronize", lambda event: note("stream", "synchronize_event", id(event)))
    after(cuda.Stream, "synchronize", lambda stream: note("stream", "synchronize_stream", on(stream)))
    after(cuda, "synchronize", lambda *_, **__: note("stream", "synchronize"))

    def restore() -> None:
        for each in reversed(undo):
            each()

    return restore


def on_making(torch: Any, act: Callable[[], None]) -> Callable[[], None]:
    """Call `act` whenever a stream is created; the returned function undoes it."""
    owner, plain = torch.cuda.Stream, torch.cuda.Stream.__new__

    def make(*arguments: Any, **keywords: Any) -> Any:
        act()
        return plain(*arguments, **keywords)

    owner.__new__ = staticmethod(make)
    return lambda: setattr(owner, "__new__", staticmethod(plain))
