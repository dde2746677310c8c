"""Ends a script as Python ends: waits for its threads, then runs the functions that it registered with `atexit`.

Our own process goes on after the script, and whatever the script still does must be part of its run.
"""

import atexit
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
_POOLS = "concurrent.futures.thread"


@contextmanager
def exit_handlers_at_end() -> Iterator[None]:
    """Collect what is registered inside; at the end wait for threads, and run it, the last first."""
    calls: list[_Call] = []
    threads_before = set(threading.enumerate())
    register, unregister = atexit.register, atexit.unregister

    def collect(function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Callable[..., Any]:
        # Finalizers of objects that outlive the script run at the end of the process.
        if function == weakref.finalize._exitfunc:  # type: ignore[attr-defined]
            return register(function, *arguments, **keywords)
        calls.append((function, arguments, keywords))
        return function

    def forget(function: Callable[..., Any]) -> None:
        calls[:] = [call for call in calls if call[0] != function]
        unregister(function)

    atexit.register, atexit.unregister = collect, forget
    try:
        yield
    finally:
        _finish_threads(threads_before)
        while calls:
            function, arguments, keywords = calls.pop()
            try:
                function(*arguments, **keywords)
            except Exception:
                sys.stderr.write(f"Exception in an atexit function of the script:\n{traceback.format_exc()}")
        atexit.register, atexit.unregister = register, unregister


def _finish_threads(before: set[threading.Thread]) -> None:
    """Wait for the script's threads; those of pools finish what they were given."""
    pools: Any = sys.modules.get(_POOLS)
    if pools is not None:
        with pools._global_shutdown_lock:
            pools._shutdown = True
        for thread, queue in list(pools._threads_queues.items()):
            if thread not in before:
                queue.put(None)
                thread.join()
        pools._shutdown = False
    for thread in threading.enumerate():
        if thread not in before and not thread.daemon and thread is not threading.current_thread():
            thread.join()
