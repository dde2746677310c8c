"""Files that the user asks Tonnage for inside a `with tonnage.virtual_gpu(...)`: a plan, a recording, a page.

What else is written inside such a block holds made-up values and goes to a scratch folder; these are results, and are
written in place.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

Pause = Callable[[], AbstractContextManager[None]]

_pauses: list[Pause] = []  # of the redirections that are active


@contextmanager
def results_in_place() -> Iterator[None]:
    """Let this thread write in place."""
    with ExitStack() as paused:
        for pause in _pauses:
            paused.enter_context(pause())
        yield


def pause_for_results(pause: Pause) -> Callable[[], None]:
    """Pause a redirection while results are written; the returned function ends that."""
    _pauses.append(pause)
    return lambda: _pauses.remove(pause)
