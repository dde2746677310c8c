"""Runs the functions that a script registers with `atexit` when the script ends, rather than when our process does."""

import atexit
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


@contextmanager
def exit_handlers_at_end() -> Iterator[None]:
    """Collect what is registered inside, and run it at the end, the last first, as Python does."""
    calls: list[_Call] = []
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
        while calls:
            function, arguments, keywords = calls.pop()
            try:
                function(*arguments, **keywords)
            except Exception:
                sys.stderr.write(f"Exception in an atexit function of the script:\n{traceback.format_exc()}")
        atexit.register, atexit.unregister = register, unregister
