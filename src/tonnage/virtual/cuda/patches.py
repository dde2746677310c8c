"""Attributes set for a while: whatever was there before comes back."""

from collections.abc import Callable, MutableMapping
from typing import Any

_MISSING = object()


class Patches:
    """Changes to modules, classes and dictionaries, undone last first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """`owner.name = value`; what a class inherits it shall inherit again."""
        own = isinstance(owner, type) and name != "__bases__"
        old = owner.__dict__.get(name, _MISSING) if own else getattr(owner, name, _MISSING)
        setattr(owner, name, value)
        self._undo.append(lambda: delattr(owner, name) if old is _MISSING else setattr(owner, name, old))

    def set_item(self, mapping: MutableMapping[str, Any], key: str, value: Any) -> None:
        """`mapping[key] = value`."""
        old = mapping.get(key, _MISSING)
        mapping[key] = value
        self._undo.append(lambda: mapping.__delitem__(key) if old is _MISSING else mapping.__setitem__(key, old))

    def set_all(self, owner: Any, values: dict[str, Any]) -> None:
        """Several attributes of one owner."""
        for name, value in values.items():
            self.set(owner, name, value)

    def on_undo(self, call: Callable[[], None]) -> None:
        """Something else to do at the end."""
        self._undo.append(call)

    def undo(self) -> None:
        """Put everything back; a second call does nothing."""
        while self._undo:
            self._undo.pop()()
