"""Imports without garbage collection: they make a million objects, and looking for garbage takes a fifth of the time.

A script's own collections are left as they are: cycles that hold tensors die when they would.
"""

import builtins
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def no_collection() -> Iterator[None]:
    """No collection inside."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def quick_imports() -> Iterator[None]:
    """Every `import` statement inside runs without collection; what was imported before is not looked at again."""
    plain = builtins.__import__

    def quick_import(*arguments: Any, **keywords: Any) -> Any:
        if not gc.isenabled():
            return plain(*arguments, **keywords)
        gc.disable()
        try:
            return plain(*arguments, **keywords)
        finally:
            gc.enable()

    gc.freeze()
    builtins.__import__ = quick_import
    try:
        yield
    finally:
        builtins.__import__ = plain
        gc.unfreeze()
