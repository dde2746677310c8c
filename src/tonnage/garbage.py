"""Garbage collection as a script would have it without Tonnage.

Python collects cycles after a certain number of new objects. Those that Tonnage makes while it watches a script would
bring the next collection forward, and tensors in the script's reference cycles (an object whose methods are hooks, a
caught exception) would be freed earlier than on a real GPU. So while a script is watched, the threshold rises by the
number of Tonnage's own objects.
"""

import gc
from collections.abc import Callable
from typing import Any


class _OwnObjects:
    """Counts the objects that Tonnage made since the last collection, while a script is watched."""

    def __init__(self) -> None:
        self.is_watching = False
        self.count = 0
        self.collections = 0
        self._threshold = 0  # the script's
        self._raised = 0  # the one that is set instead

    def start(self) -> None:
        self.stop()
        self.is_watching = True
        self.count = gc.get_count()[0]  # of preparations
        self._threshold = self._raised = gc.get_threshold()[0]
        self._set()
        gc.callbacks.append(self._collected)

    def stop(self) -> None:
        if not self.is_watching:
            return
        self.is_watching = False
        gc.callbacks.remove(self._collected)
        self.count = 0
        self._set()

    def add(self, count: int) -> None:
        # What remains of Python's count is the script's. It never falls below zero, as without us.
        self.count = min(self.count + count, gc.get_count()[0])
        self._set()

    def _collected(self, phase: str, _: dict[str, int]) -> None:
        if phase == "stop":
            self.collections += 1
            self.count = 0
            self._set()

    def _set(self) -> None:
        first, second, third = gc.get_threshold()
        if first != self._raised:  # the script has set its own
            self._threshold = first
        if self._threshold == 0:  # the script wants no collections
            self._raised = 0
            return
        self._raised = max(self._threshold + self.count, 1)
        gc.set_threshold(self._raised, second, third)


_own = _OwnObjects()


class no_collection:
    """Disable garbage collection inside the block. What is made in it does not bring the next collection forward."""

    __slots__ = ("_collections", "_count", "_own_count", "_was_enabled")

    def __enter__(self) -> None:
        self._was_enabled = gc.isenabled()
        gc.disable()
        self._collections = _own.collections
        self._own_count = _own.count
        self._count = gc.get_count()[0]

    def __exit__(self, *error: object) -> None:
        if _own.is_watching:
            made = gc.get_count()[0]
            if self._collections == _own.collections:
                made -= self._count
                made -= _own.count - self._own_count  # counted by a block within this one
            else:
                made -= _own.count
            if made > 0:  # less where objects of the script died
                _own.add(made)
        if self._was_enabled:
            gc.enable()


def made_own_objects(count: int) -> None:
    """Note that Tonnage made so many objects that it keeps, outside of a `no_collection` block."""
    if _own.is_watching:
        _own.add(count)


def watch_collections() -> Callable[[], Any]:
    """Keep Tonnage's own objects from bringing collections forward; the returned function ends that."""
    _own.start()
    return _own.stop
