"""The data behind explanations of texts (`data/`), as records whose shape is checked when a file is read.

A list where a text belongs, or the reverse, would otherwise show only in the advice, letter by letter.
"""

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

DATA = Path(__file__).parent / "data"
Certainty = Literal["certain", "likely", "possible"]
Row = Mapping[str, Any]
_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True)
class CauseText:
    """A cause in words; `windows_steps` come first unless the text is from another system."""

    title: str
    unproved: str
    steps: tuple[str, ...]
    windows_steps: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Framework:
    """How a framework calls what one changes, and its own advice for some causes instead of the general."""

    name: str
    mark: re.Pattern[str]
    words: dict[str, str]
    advice: dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """A kind of work that frames of a traceback show, and the cause that it implies."""

    name: str
    cause: str
    pattern: re.Pattern[str]
    says: str
    steps: tuple[str, ...]
    least_share: float


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """A phase, and the frames that show it."""

    name: str
    pattern: re.Pattern[str]


@dataclass(frozen=True, slots=True)
class MessageRow:
    """A message of another program, and what it proves; `says_plainly` is for one without figures."""

    id: str
    speaker: str
    pattern: re.Pattern[str]
    cause: str
    certainty: Certainty
    says: str
    says_plainly: str
    unproved: str
    steps: tuple[str, ...]
    phase: str
    alone: bool
    whole_line: bool


@dataclass(frozen=True, slots=True)
class UnifiedRow:
    """A kind of device whose GPU uses the host's memory, by its names."""

    name: str
    mark: re.Pattern[str]


class _Reader:
    """One row of a file: every key is taken once, by its type; what is left over is an error."""

    def __init__(self, file: str, row: Any) -> None:
        if not isinstance(row, dict):
            raise ValueError(f"{file}.toml: {row!r} is not a table")
        self._file = file
        self._row = dict(row)
        self._name = next((row[key] for key in ("id", "name", "title") if key in row), "a row")

    def text(self, key: str, default: str | None = None) -> str:
        """Take a text."""
        value: str = self._take(key, default, str)
        return value

    def texts(self, key: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """Take a list of texts."""
        return _texts(self._take(key, default, (list, tuple)), self._where(key))

    def pattern(self, key: str) -> re.Pattern[str]:
        """Take a regular expression."""
        return re.compile(self.text(key))

    def flag(self, key: str) -> bool:
        """Take a truth value; false if absent."""
        value: bool = self._take(key, False, bool)
        return value

    def share(self, key: str) -> float:
        """Take a share; 0 if absent."""
        return float(self._take(key, 0.0, (int, float)))

    def table(self, key: str) -> dict[str, Any]:
        """Take a table; empty if absent."""
        value: dict[str, Any] = self._take(key, {}, dict)
        return value

    def done(self) -> None:
        """Raise ValueError for keys that nothing has taken."""
        if self._row:
            raise ValueError(f"{self._where(next(iter(self._row)))} is not known")

    def _take(self, key: str, default: Any, kind: Any) -> Any:
        value = self._row.pop(key, default)
        if value is None:
            raise ValueError(f"{self._where(key)} is missing")
        if not isinstance(value, kind):
            raise ValueError(f"{self._where(key)} is {value!r}")
        return value

    def _where(self, key: str) -> str:
        return f"{self._file}.toml: {key} of {self._name!r}"


def _texts(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(text, str) for text in value):
        raise ValueError(f"{where} is {value!r}, not a list of texts")
    return tuple(value)


def cause_texts_of(data: Row) -> dict[str, CauseText]:
    """Return the causes of a parsed file, by name."""
    found = {}
    for name, row in data.items():
        read = _Reader("causes", row)
        steps, windows_steps = read.texts("steps"), read.texts("windows_steps", ())
        found[name] = CauseText(read.text("title"), read.text("unproved"), steps, windows_steps)
        read.done()
    return found


def frameworks_of(data: Row) -> tuple[Framework, ...]:
    """Return the frameworks of a parsed file, in order."""

    def framework(read: _Reader) -> Framework:
        name, mark = read.text("name"), read.pattern("mark")
        words = read.table("words")
        for key, value in words.items():
            if not isinstance(value, str):
                raise ValueError(f"frameworks.toml: the word {key} of {name!r} is {value!r}")
        advice = {
            cause: _texts(steps, f"frameworks.toml: the advice {cause} of {name!r}")
            for cause, steps in read.table("advice").items()
        }
        return Framework(name, mark, words, advice)

    return _rows("frameworks", data, "frameworks", framework)


def operators_of(data: Row) -> tuple[OperatorRow, ...]:
    """Return the operators of a parsed file, the more specific first."""
    return _rows(
        "places",
        data,
        "operators",
        lambda read: OperatorRow(
            name=read.text("name"),
            cause=read.text("cause"),
            pattern=read.pattern("pattern"),
            says=read.text("says"),
            steps=read.texts("steps"),
            least_share=read.share("least_share"),
        ),
    )


def phases_of(data: Row) -> tuple[PhaseRow, ...]:
    """Return the phases of a parsed file, in the order in which they are looked for."""
    return _rows("places", data, "phases", lambda read: PhaseRow(read.text("name"), read.pattern("pattern")))


def messages_of(data: Row) -> tuple[MessageRow, ...]:
    """Return the messages of a parsed file, the more specific first."""

    def message(read: _Reader) -> MessageRow:
        certainty = read.text("certainty")
        if certainty not in get_args(Certainty):
            raise ValueError(f"words.toml: {certainty!r} is no certainty")
        says = read.text("says")
        return MessageRow(
            id=read.text("id"),
            speaker=read.text("speaker"),
            pattern=read.pattern("pattern"),
            cause=read.text("cause"),
            certainty=certainty,  # type: ignore[arg-type]  # checked above
            says=says,
            says_plainly=read.text("says_plainly", says.replace("{", "").replace("}", "")),
            unproved=read.text("unproved"),
            steps=read.texts("steps"),
            phase=read.text("phase", ""),
            alone=read.flag("alone"),
            whole_line=read.flag("whole_line"),
        )

    return _rows("words", data, "words", message)


def unified_of(data: Row) -> tuple[UnifiedRow, ...]:
    """Return the devices with unified memory of a parsed file."""
    return _rows("devices", data, "unified", lambda read: UnifiedRow(read.text("name"), read.pattern("mark")))


def _rows(file: str, data: Row, key: str, build: Callable[[_Reader], _Record]) -> tuple[_Record, ...]:
    records = []
    for row in data[key]:
        read = _Reader(file, row)
        records.append(build(read))
        read.done()
    return tuple(records)


@cache
def parsed(name: str) -> dict[str, Any]:
    """Return a file of the folder `data`, parsed and not checked."""
    return tomllib.loads((DATA / f"{name}.toml").read_text("utf-8"))


@cache
def cause_texts() -> dict[str, CauseText]:
    """Return every cause in words."""
    return cause_texts_of(parsed("causes"))


@cache
def frameworks() -> tuple[Framework, ...]:
    """Return the frameworks; the last one matches every text."""
    return frameworks_of(parsed("frameworks"))


@cache
def operators() -> tuple[OperatorRow, ...]:
    """Return the kinds of work that frames show."""
    return operators_of(parsed("places"))


@cache
def phases() -> tuple[PhaseRow, ...]:
    """Return the phases that frames show."""
    return phases_of(parsed("places"))


@cache
def messages() -> tuple[MessageRow, ...]:
    """Return the messages of other programs."""
    return messages_of(parsed("words"))


@cache
def events() -> tuple[str, ...]:
    """Return the words of lines that tell of memory that ran out."""
    return _texts(parsed("words")["events"], "words.toml: events")


@cache
def unified_devices() -> tuple[UnifiedRow, ...]:
    """Return the devices whose GPU uses the host's memory."""
    return unified_of(parsed("devices"))
