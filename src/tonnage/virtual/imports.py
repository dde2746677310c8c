"""Speeds up imports, which take most of the time of a virtual run.

- Garbage collection is off: imports create a million objects, and collection takes a fifth of the time. The script's
  own collections are unchanged, so cycles that hold tensors die when they would.
- A package can be lazy: its submodules import, and its own code runs when an attribute is accessed.
"""

import builtins
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from tonnage.garbage import no_collection


@contextmanager
def quick_imports() -> Iterator[None]:
    """Disable garbage collection during `import` statements, and exclude objects that exist already from it."""
    plain = builtins.__import__

    def quick_import(*arguments: Any, **keywords: Any) -> Any:
        if not gc.isenabled():
            return plain(*arguments, **keywords)
        with no_collection():
            return plain(*arguments, **keywords)

    gc.freeze()
    builtins.__import__ = quick_import
    try:
        yield
    finally:
        builtins.__import__ = plain
        gc.unfreeze()


class _Waiting(ModuleType):
    """A package whose code has not run yet."""

    def __getattr__(self, name: str) -> Any:
        loader = _lazy_loader(self)
        if loader is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if name in loader.answers:
            return loader.answers[name]
        if name == "config" and find_spec(f"{self.__name__}.config"):
            return import_module(f"{self.__name__}.config")
        if name.startswith("__"):
            raise AttributeError(name)
        loader.run(self)
        return getattr(self, name)


class _LazyLoader(Loader):
    """Creates a package whose code runs when an attribute is accessed that has no prepared answer."""

    def __init__(self, plain: Loader, answers: dict[str, Any], on_wake: Callable[[ModuleType], None]) -> None:
        self._plain, self.answers, self._on_wake = plain, answers, on_wake

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Waiting(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...

    def run(self, module: ModuleType) -> None:
        module.__class__ = ModuleType
        with no_collection():
            self._plain.exec_module(module)
        self._on_wake(module)


def _lazy_loader(module: ModuleType | None) -> _LazyLoader | None:
    loader = module.__spec__.loader if module and module.__spec__ else None
    return loader if isinstance(loader, _LazyLoader) else None


def lazily(
    spec: ModuleSpec | None, answers: dict[str, Any], on_wake: Callable[[ModuleType], None] = lambda module: None
) -> ModuleSpec | None:
    """Make a package's spec lazy: its code runs when an attribute is accessed that is not in `answers`.

    `on_wake` is called with the package when its code has run, before its attributes are used.
    """
    if spec and spec.loader:
        spec.loader = _LazyLoader(spec.loader, answers, on_wake)
    return spec


def wake(name: str) -> None:
    """Import a package and, if it is lazy, run its code now."""
    module = import_module(name)
    if isinstance(module, _Waiting) and (loader := _lazy_loader(module)):
        loader.run(module)


def release(name: str) -> None:
    """Drop the answers prepared for a package that was imported lazily."""
    if loader := _lazy_loader(sys.modules.get(name)):
        loader.answers = {}
