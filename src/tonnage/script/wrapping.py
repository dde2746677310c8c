"""Replaces functions of a library while something watches them."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any


def wrap(undo: ExitStack, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function by `around`, which gets it and its arguments, until `undo` is closed."""
    plain = getattr(owner, name)

    @wraps(plain)
    def call(*arguments: Any, **keywords: Any) -> Any:
        return around(plain, *arguments, **keywords)

    setattr(owner, name, call)
    undo.callback(setattr, owner, name, plain)
