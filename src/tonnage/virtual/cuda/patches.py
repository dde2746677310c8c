"""Temporary changes to attributes and dictionaries."""

from collections.abc import Callable, MutableMapping
from typing import Any

_MISSING = object()


class Patches:
    """Changes to modules, classes and dictionaries, undone in reverse order."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name = value`. On undo, an attribute that a class inherited is inherited again."""
        own = isinstance(owner, type) and name != "__bases__"
        old = owner.__dict__.get(name, _MISSING) if own else getattr(owner, name, _MISSING)
        setattr(owner, name, value)
        self._undo.append(lambda: delattr(owner, name) if old is _MISSING else setattr(owner, name, old))

    def set_item(self, mapping: MutableMapping[str, Any], key: str, value: Any) -> None:
        """Set `mapping[key] = value`."""
        old = mapping.get(key, _MISSING)
        mapping[key] = value
        self._undo.append(lambda: mapping.__delitem__(key) if old is _MISSING else mapping.__setitem__(key, old))

    def set_all(self, owner: Any, values: dict[str, Any]) -> None:
        """Set several attributes of one owner."""
        for name, value in values.items():
            self.set(owner, name, value)

    def set_methods(self, owner: Any, supplier: Any) -> None:
        """Set all methods of an object as attributes of `owner`, under their own names."""
        self.set_all(owner, {name: getattr(supplier, name) for name in vars(type(supplier)) if name[:2] != "__"})

    def on_undo(self, call: Callable[[], None]) -> None:
        """Call this on undo."""
        self._undo.append(call)

    def undo(self) -> None:
        """Restore everything; a second call does nothing."""
        while self._undo:
            self._undo.pop()()
