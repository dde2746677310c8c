"""Validates a recording's file as it is read, so that readers can rely on the type of each value.

SQLite checks columns in one pass over each table; JSON values are checked by the annotations of their record.
"""

import math
import reprlib
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, get_args

from tonnage.recording.records import FailedRequest, Header, MarkKind, NoteKind, Outcome, SegmentAction, Source

Kinds = Mapping[str, Callable[[Any], bool]]
_MOST_BYTES = 2**50
_MOST_WORDS = 10_000
_MOST_EXTENTS = 64
# Sequence numbers that a file may skip.
_SKIPPED = 100_000


def is_words(value: Any) -> bool:
    """Whether the value is a string."""
    return isinstance(value, str)


def is_whole(value: Any) -> bool:
    """Whether the value is a 64-bit integer."""
    return type(value) is int and -(2**63) <= value < 2**63


def is_count(value: Any) -> bool:
    """Whether the value is an integer that is not negative."""
    return is_whole(value) and value >= 0


def is_sizes(value: Any) -> bool:
    """Whether the value maps names to counts."""
    return isinstance(value, dict) and all(map(is_count, value.values()))


def is_facts(value: Any) -> bool:
    """Whether the value maps names to strings, within the size limit."""
    return isinstance(value, dict) and len(value) <= _MOST_WORDS and all(map(is_words, value.values()))


def is_outcome(value: Any) -> bool:
    """Whether the value is an outcome of a run."""
    return value in get_args(Outcome)


def is_word_list(value: Any) -> bool:
    """Whether the value is a list of strings, within the size limit."""
    return isinstance(value, list) and len(value) <= _MOST_WORDS and all(map(is_words, value))


def is_shape(value: Any) -> bool:
    """Whether the value is a tensor's shape, or None."""
    return value is None or (isinstance(value, list) and len(value) <= _MOST_EXTENTS and all(map(is_count, value)))


def is_seconds(value: Any) -> bool:
    """Whether the value is a finite time that is not negative."""
    return type(value) in (int, float) and math.isfinite(value) and 0 <= value < 2**63


_BY_ANNOTATION: dict[Any, Callable[[Any], bool]] = {
    str: is_words,
    int: is_whole,
    float: is_seconds,
    Outcome: is_outcome,
    Source: lambda value: value in get_args(Source),
    tuple[str, ...]: is_word_list,
    tuple[int, ...] | None: is_shape,
    dict[str, int]: is_sizes,
    dict[str, str]: is_facts,
}


def _kinds_of(record: type) -> Kinds:
    """Return the check for each field of a record; sizes in bytes are never negative."""
    return {
        field.name: is_count if field.name.endswith("_bytes") else _BY_ANNOTATION[field.type]
        for field in fields(record)
    }


HEADER_KINDS = _kinds_of(Header)
OOM_KINDS = _kinds_of(FailedRequest)


def check_values(values: Any, kinds: Kinds, what: str) -> None:
    """Raise ValueError unless the values have exactly the keys of `kinds` and pass their checks."""
    if not isinstance(values, dict) or set(values) != set(kinds):
        raise ValueError(f"its {what} is incomplete")
    for key, value in values.items():
        if not kinds[key](value):
            raise ValueError(f"its {key} is {reprlib.repr(value)}")


# ── columns ──

_TEXT, _ANY = "typeof({0}) = 'text'", "typeof({0}) = 'integer'"
_COUNT, _SIZE = f"{_ANY} AND {{0}} >= 0", f"{_ANY} AND {{0}} BETWEEN 0 AND {_MOST_BYTES}"


def _one_of(words: Any) -> str:
    return f"{{0}} IN ({', '.join(map(repr, get_args(words)))})"


_COLUMNS: dict[str, dict[str, str]] = {
    "allocation": {
        **dict.fromkeys(('"index"', "address", "born", "step"), _COUNT),
        **dict.fromkeys(("requested_bytes", "block_bytes"), _SIZE),
        **dict.fromkeys(("stream", "context"), _ANY),
        "died": f"{{0}} IS NULL OR ({_ANY} AND {{0}} > born)",
    },
    "segment": {"sequence": _COUNT, "action": _one_of(SegmentAction), "address": _COUNT, "size_bytes": _SIZE, "stream": _ANY},
    "mark": {"sequence": _COUNT, "kind": _one_of(MarkKind), "name": f"{_TEXT} AND (kind != 'step' OR length({{0}}) < 19)"},
    "stand_in": {"what": _TEXT, "line": _TEXT, "count": _COUNT, "value": _TEXT},
    "note": {"kind": _one_of(NoteKind), "operator": _TEXT, "count": _COUNT, "text": _TEXT},
    "context": dict.fromkeys(
        ("category", "operator", "module", "phase", "line", "stack", "shape", "dtype"), _TEXT
    ),
}  # fmt: skip


def check_columns(database: sqlite3.Connection) -> None:
    """Raise ValueError for rows that no run can have written, such as a block that dies before it is born."""
    for table, columns in _COLUMNS.items():
        rules = {column: f"coalesce({rule.format(column)}, 0)" for column, rule in columns.items()}
        if _first(database, table, " AND ".join(rules.values())) is None:
            continue
        for column, rule in rules.items():
            wrong = _first(database, table, rule, column)
            if wrong is not None:
                raise ValueError(f"its table {table!r} holds a {column} of {reprlib.repr(wrong[0])}")
    _check_sequence(database)


def _first(database: sqlite3.Connection, table: str, rule: str, column: str = "1") -> Any:
    return database.execute(f"SELECT {column} FROM {table} WHERE NOT ({rule}) LIMIT 1").fetchone()


def _check_sequence(database: sqlite3.Connection) -> None:
    """Check that sequence numbers do not exceed the number of events by much; other versions may have skipped some."""
    (events,) = database.execute(
        "SELECT 2 * (SELECT count(*) FROM allocation) + (SELECT count(*) FROM segment)"
    ).fetchone()
    (last,) = database.execute(
        "SELECT max(coalesce((SELECT max(max(born, coalesce(died, 0))) FROM allocation), 0),"
        " coalesce((SELECT max(sequence) FROM segment), 0), coalesce((SELECT max(sequence) FROM mark), 0))"
    ).fetchone()
    if last > 2 * events + _SKIPPED:
        raise ValueError(f"it has an event {last:,} and only {events:,} of them")
