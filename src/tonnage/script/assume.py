"""The values that a user gives for what a script reads from a virtual GPU: `tonnage.assume(...)` and `--assume`.

Without a virtual GPU nothing asks for them, so on a real GPU they change nothing.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tonnage.errors import RequestError

_EXAMPLE = "Write the script's line and the value, as in: --assume train.py:88=true, or train.py:90=0.5"


class BadAssumption(RequestError, ValueError):
    """An assumed value that is not written as LINE=VALUE, or is none."""


@dataclass(frozen=True, slots=True)
class _Block:
    """What holds inside one `with tonnage.assume(...)`."""

    flag: bool | None
    number: float | None


_blocks: list[_Block] = []
_by_line: dict[str, float] = {}
_unused: set[str] = set()


@contextmanager
def assume(*, flag: bool | None = None, number: float | None = None) -> Iterator[None]:
    """Assume these values for what is read from a virtual GPU inside the block; on a real GPU nothing changes.

        with tonnage.assume(flag=True, number=0.5):
            while not solver.converged():       # a flag whose value is not known is True here
                solver.step()
            print(solver.error.item())          # a number whose value is not known is 0.5

    Values that are known keep their own. Blocks may be nested; the innermost that names a value counts.
    """
    if flag is None and number is None:
        raise BadAssumption(
            "tonnage.assume() was called without a value.", hint="Name one: tonnage.assume(flag=True, number=0.5)"
        )
    if number is not None and not math.isfinite(number):
        raise BadAssumption(f"tonnage.assume(number={number}) is not finite.", hint="Name a finite number.")
    _blocks.append(_Block(flag, number))
    try:
        yield
    finally:
        _blocks.pop()


def assume_lines(words: list[str]) -> None:
    """Assume a value for every read at a line of the script: "train.py:88=true" or "train.py:90=0.5"."""
    _by_line.clear()
    _unused.clear()
    for word in words:
        place, sign, text = word.rpartition("=")
        name, _, number = place.rpartition(":")
        if not sign or not name or not number.isdigit():
            raise BadAssumption(f"--assume {word} does not name a line and a value.", hint=_EXAMPLE)
        line = f"{name.replace(chr(92), '/').rpartition('/')[2]}:{int(number)}"
        _by_line[line] = _value(text, word)
        _unused.add(line)


def _value(text: str, word: str) -> float:
    text = text.strip().lower()
    if text in ("true", "false"):
        return float(text == "true")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadAssumption(f"--assume {word}: {text or 'nothing'} is no value.", hint=_EXAMPLE)
    return value


def assumed_value(line: str, *, is_flag: bool) -> float | None:
    """Return the value that the user gave for a read at this line of the script, if any."""
    if line in _by_line:
        _unused.discard(line)
        return _by_line[line]
    for block in reversed(_blocks):
        value = block.flag if is_flag else block.number
        if value is not None:
            return float(value)
    return None


def unused_lines() -> list[str]:
    """Return the lines of `--assume` at which no value was read."""
    return sorted(_unused)
