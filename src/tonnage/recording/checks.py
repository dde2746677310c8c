"""Validates a recording's file as it is read, so that readers can rely on the type of each value.

SQLite checks columns in one pass over each table; JSON values are checked by the annotations of their record.
"""

import math
import reprlib
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, Literal, TypeVar, get_args, get_origin

from tonnage.ledger import Category
from tonnage.recording.records import MarkKind, NoteKind, SegmentAction

T = TypeVar("T")
_MOST_BYTES = 2**50
_MOST_WORDS = 10_000
_MOST_EXTENTS = 64
_MOST_ROWS = 2**20
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


def is_word_list(value: Any) -> bool:
    """Whether the value is a list of strings, within the size limit."""
    return isinstance(value, list) and len(value) <= _MOST_WORDS and all(map(is_words, value))


def is_shape(value: Any) -> bool:
    """Whether the value is a tensor's shape, or None."""
    return value is None or (isinstance(value, list) and len(value) <= _MOST_EXTENTS and all(map(is_count, value)))


def _is_facts(value: Any) -> bool:
    return isinstance(value, dict) and len(value) <= _MOST_WORDS and all(map(is_words, value.values()))


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and 0 <= value < 2**63


def _is_extents(value: Any) -> bool:
    """Whether the value is a list of counts, nested no deeper than a list of tensors per argument."""
    return isinstance(value, list) and all(
        isinstance(entry, list) and all(is_count(n) or (isinstance(n, list) and all(map(is_count, n))) for n in entry)
        for entry in value
    )


def _is_phases(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and is_count(pair[0]) and is_words(pair[1]) for pair in value
    )


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= _MOST_ROWS


_BY_NAME: dict[str, Callable[[Any], bool]] = {
    "exit_status": is_whole,
    "stands_for": _is_rows,  # ranges of ranks
    "ledger": lambda value: is_sizes(value) and set(value) <= {str(category) for category in Category},
}
_BY_ANNOTATION: dict[Any, Callable[[Any], bool]] = {
    str: is_words,
    int: is_count,
    bool: lambda value: isinstance(value, bool),
    float: _is_seconds,
    int | None: lambda value: value is None or is_count(value),
    float | None: lambda value: value is None or _is_seconds(value),
    tuple[str, ...]: is_word_list,
    tuple[int, ...]: lambda value: isinstance(value, list) and all(map(is_count, value)),
    tuple[int, ...] | None: is_shape,
    tuple[tuple[int, str], ...]: _is_phases,
    tuple[Any, ...]: _is_extents,
    dict[str, int]: is_sizes,
    Mapping[str, int]: is_sizes,
    dict[str, str]: _is_facts,
}


@cache
def _kinds_of(record: Any) -> dict[str, Callable[[Any], bool]]:
    """Return the check for each field of a record, by its name or annotation."""
    kinds = {}
    for field in fields(record):
        kind = _BY_NAME.get(field.name) or _BY_ANNOTATION.get(field.type)
        if kind is None and get_origin(field.type) is Literal:
            kind = get_args(field.type).__contains__
        kinds[field.name] = kind or (_is_rows if get_origin(field.type) is tuple else lambda value: type(value) is dict)
    return kinds


def record_of(record: type[T], values: Any, what: str, **parts: Callable[[Any], Any]) -> T:
    """Check a JSON object by a record's annotations and return the record; `parts` build its nested records.

    Raises ValueError unless the object has exactly the record's fields and each has its type.
    """
    kinds = _kinds_of(record)  # type: ignore[arg-type]  # classes are hashable
    if not isinstance(values, dict) or set(values) != set(kinds):
        raise ValueError(f"its {what} is incomplete")
    for key, value in values.items():
        if not kinds[key](value):
            raise ValueError(f"its {key} is {reprlib.repr(value)}")
    return record(**{key: parts.get(key, _frozen)(value) for key, value in values.items()})


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


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
    # Other versions may have skipped some sequence numbers, but not many.
    (events,) = database.execute(
        "SELECT 2 * (SELECT count(*) FROM allocation) + (SELECT count(*) FROM segment)"
    ).fetchone()
    (last,) = database.execute(
        "SELECT max(coalesce((SELECT max(max(born, coalesce(died, 0))) FROM allocation), 0),"
        " coalesce((SELECT max(sequence) FROM segment), 0), coalesce((SELECT max(sequence) FROM mark), 0))"
    ).fetchone()
    if last > 2 * events + _SKIPPED:
        raise ValueError(f"it has an event {last:,} and only {events:,} of them")


def _first(database: sqlite3.Connection, table: str, rule: str, column: str = "1") -> Any:
    return database.execute(f"SELECT {column} FROM {table} WHERE NOT ({rule}) LIMIT 1").fetchone()
