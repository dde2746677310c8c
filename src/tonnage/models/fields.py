"""Read a configuration's fields under the names that model families use (`data/synonyms.json`); reject invalid values."""

import json
import math
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from tonnage.errors import BadModel

# No dimension of a model comes near this; a larger number is a mistake.
LARGEST = 10**9

SYNONYMS: Mapping[str, list[str]] = json.loads((Path(__file__).parent / "data" / "synonyms.json").read_bytes())


class Fields:
    """The fields of a configuration, or of a part of it, found by `lookup`; null counts as absent."""

    def __init__(self, lookup: Callable[[str], Any], part: str = "") -> None:
        self._lookup, self.part = lookup, part
        self._prefix = f"{part}." if part else ""

    def get(self, name: str, default: Any = None) -> Any:
        """Return the field as written."""
        value = self._lookup(self._prefix + name)
        return default if value is None else value

    def find(self, meant: str) -> int | None:
        """Return the integer under any synonym of `meant`; None if absent."""
        name = self._name(meant)
        return self.whole(name) if name is not None else None

    def need(self, meant: str) -> int:
        """Like `find`, but raises unless it is at least one."""
        name = self._name(meant)
        if name is None:
            known_as = ", ".join(SYNONYMS[meant][:3])
            problem = f"The configuration does not say {meant!r}."
            raise BadModel(problem, hint=f"Add the field; it is known as: {known_as}.")
        return self.whole(name, least=1)

    def whole(self, name: str, *, least: int = 0) -> int:
        """Return one validated integer field."""
        return whole(self.get(name), self._prefix + name, least=least)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean field."""
        return truth(self.get(name, default), self._prefix + name)

    def _name(self, meant: str) -> str | None:
        return next((name for name in SYNONYMS[meant] if not isinstance(self.get(name), (list, dict, NoneType))), None)


def truth(value: object, name: str) -> bool:
    """Reject a string instead of a boolean: Python treats "false" as true."""
    if isinstance(value, str):
        problem = f"{name!r} is the text {reprlib.repr(value)}, not true or false."
        raise BadModel(problem, hint=f"Write true or false for {name!r}, without quotation marks.")
    return bool(value)


def whole(value: object, name: str, *, least: int = 0) -> int:
    """Return a valid integer, or raise."""
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadModel(f"{name!r} is {reprlib.repr(value)}, not a whole number.", hint=f"Give {name!r} a whole number.")
    if not least <= value <= LARGEST:
        raise BadModel(f"{name!r} is {reprlib.repr(value)}.", hint=f"It must lie between {least} and {LARGEST:,}.")
    return value
