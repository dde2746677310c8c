"""The layout of a recording's file, and how it is opened. Nothing in a file is trusted.

`application_id` marks the file as ours, and `user_version` gives its layout: 5 is the run of one GPU, 6 that of a
cluster; 3 and 4 lack streams and collectives in captured steps, 1 and 2 lack captured steps. A file whose tables are
not exactly those of its layout is refused before any row is read. SQLite then checks columns in one pass over each table;
JSON values are checked by the annotations of their record.

| table      | a row is                                             |
|------------|------------------------------------------------------|
| header     | one key of the header, with its value as JSON        |
| context    | what many blocks have in common: operator, line, ... |
| allocation | a block, with the id of its context                  |
| segment, mark, stand_in, note, oom | the record of that name      |
| captured   | the calls of a typical step, as compressed JSON      |

In a cluster's file each row of these, except of `context`, begins with its rank, and there are two more tables:

| table      | a row is                                                                          |
|------------|-----------------------------------------------------------------------------------|
| cluster    | one key of the cluster's summary, with its value as JSON                          |
| rank       | a rank that ran: its summary as JSON, and the rank that its events are stored for  |
"""

import os
import reprlib
import sqlite3
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from tonnage.errors import BadRecording, OutputExists, RequestError
from tonnage.ledger import Category
from tonnage.recording.records import MarkKind, NoteKind, SegmentAction
from tonnage.results import results_in_place
from tonnage.untrusted import printable_lines

T = TypeVar("T")
Check = Callable[[Any], bool]
_MOST_BYTES = 2**50
_MOST_WORDS = 10_000
_MOST_EXTENTS = 64
_MOST_ROWS = 2**20
# Sequence numbers that a file may skip.
_SKIPPED = 100_000


def _is_words(value: Any) -> bool:
    return isinstance(value, str)


def _is_whole(value: Any) -> bool:
    """Whether the value is a 64-bit integer."""
    return type(value) is int and -(2**63) <= value < 2**63


def _is_count(value: Any) -> bool:
    return _is_whole(value) and value >= 0


def _is_seconds(value: Any) -> bool:
    # False for nan and infinity too; `math.isfinite` raises for an integer beyond the floats.
    return type(value) in (int, float) and 0 <= value < 2**63


def _list_of(check: Check, most: int = sys.maxsize) -> Check:
    return lambda value: isinstance(value, list) and len(value) <= most and all(map(check, value))


def _dict_of(check: Check, most: int = sys.maxsize) -> Check:
    return lambda value: isinstance(value, dict) and len(value) <= most and all(map(check, value.values()))


def _optional(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _is_phase(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and _is_count(value[0]) and _is_words(value[1])


is_word_list, is_shape = _list_of(_is_words, _MOST_WORDS), _optional(_list_of(_is_count, _MOST_EXTENTS))


def is_rank(value: Any) -> bool:
    """Whether the value is the number of a rank."""
    return _is_count(value)


def _is_range(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(is_rank, value))


is_rank_ranges = _list_of(_is_range, _MOST_ROWS)
_is_counts, _is_sizes, _is_rows = _list_of(_is_count), _dict_of(_is_count), _list_of(lambda _: True, _MOST_ROWS)
_BY_NAME: dict[str, Check] = {
    "exit_status": _is_whole,
    "stands_for": is_rank_ranges,
    "ledger": lambda value: _is_sizes(value) and set(value) <= {str(category) for category in Category},
}
_BY_ANNOTATION: dict[Any, Check] = {
    str: _is_words,
    int: _is_count,
    bool: lambda value: isinstance(value, bool),
    float: _is_seconds,
    int | None: _optional(_is_count),
    float | None: _optional(_is_seconds),
    tuple[str, ...]: is_word_list,
    tuple[int, ...]: _is_counts,
    tuple[int, ...] | None: is_shape,
    tuple[tuple[int, str], ...]: _list_of(_is_phase),
    # Nested no deeper than a list of tensors per argument.
    tuple[Any, ...]: _list_of(_list_of(lambda value: _is_count(value) or _is_counts(value))),
    dict[str, int]: _is_sizes,
    Mapping[str, int]: _is_sizes,
    dict[str, str]: _dict_of(_is_words, _MOST_WORDS),
}


@cache
def _kinds_of(record: Any) -> dict[str, Check]:
    """Return the check for each field of a record, by its name or annotation."""
    kinds = {}
    for field in fields(record):
        kind = _BY_NAME.get(field.name) or _BY_ANNOTATION.get(field.type)
        if kind is None and get_origin(field.type) is Literal:
            kind = get_args(field.type).__contains__
        kinds[field.name] = kind or (_is_rows if get_origin(field.type) is tuple else lambda value: type(value) is dict)
    return kinds


def record_of(record: type[T], values: Any, what: str, **parts: Callable[[Any], Any]) -> T:
    """Return a record from an object with exactly its fields and types, else ValueError; `parts` build nested ones."""
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


APPLICATION_ID = 0x544F4E4E  # "TONN"
LAYOUT_VERSION = 5
CLUSTER_LAYOUT_VERSION = 6
_LAYOUTS_BEFORE_CAPTURE = (1, 2)
_CLUSTER_LAYOUTS = (2, 4, 6)
_MAGIC = b"SQLite format 3\0"
REMAKE = "Make it again with: tonnage run -o FILE SCRIPT"

_ONE_RUN = {
    "header": "CREATE TABLE header (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT",
    "context": (
        "CREATE TABLE context (id INTEGER PRIMARY KEY, category TEXT, operator TEXT, module TEXT, phase TEXT,"
        " line TEXT, stack TEXT, shape TEXT, dtype TEXT) STRICT"
    ),
    "allocation": (
        'CREATE TABLE allocation ("index" INTEGER PRIMARY KEY, address INTEGER, requested_bytes INTEGER,'
        " block_bytes INTEGER, stream INTEGER, born INTEGER, died INTEGER, step INTEGER, context INTEGER) STRICT"
    ),
    "segment": (
        "CREATE TABLE segment (sequence INTEGER, action TEXT, address INTEGER, size_bytes INTEGER, stream INTEGER)"
        " STRICT"
    ),
    "mark": "CREATE TABLE mark (sequence INTEGER, kind TEXT, name TEXT) STRICT",
    "stand_in": "CREATE TABLE stand_in (what TEXT, line TEXT, count INTEGER, value TEXT) STRICT",
    "note": "CREATE TABLE note (kind TEXT, operator TEXT, count INTEGER, text TEXT) STRICT",
    "oom": "CREATE TABLE oom (value TEXT) STRICT",
    "captured": "CREATE TABLE captured (step BLOB NOT NULL) STRICT",
}


def _schema(version: int) -> dict[str, str]:
    run = {
        name: text for name, text in _ONE_RUN.items() if name != "captured" or version not in _LAYOUTS_BEFORE_CAPTURE
    }
    if not is_of_cluster(version):
        return run
    of_rank = {
        table: statement.replace(" PRIMARY KEY", "").replace("(", "(rank INTEGER, ", 1)
        for table, statement in run.items()
    }
    return {
        "cluster": "CREATE TABLE cluster (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT",
        "rank": "CREATE TABLE rank (rank INTEGER PRIMARY KEY, kept INTEGER NOT NULL, summary TEXT NOT NULL) STRICT",
        **of_rank,
        "context": run["context"],
        "allocation_of_rank": "CREATE INDEX allocation_of_rank ON allocation (rank)",
    }


def is_of_cluster(version: int) -> bool:
    """Whether a file of this layout holds a cluster's run."""
    return version in _CLUSTER_LAYOUTS


SCHEMAS = {version: _schema(version) for version in (1, 2, 3, 4, LAYOUT_VERSION, CLUSTER_LAYOUT_VERSION)}


@contextmanager
def written(path: Path, version: int, *, force: bool) -> Iterator[sqlite3.Connection]:
    """Create a file with empty tables, moved into place if the block succeeds; an existing one is kept unless `force`."""
    with results_in_place():
        yield from _written(path, version, force=force)


def _written(path: Path, version: int, *, force: bool) -> Iterator[sqlite3.Connection]:
    if path.exists() and not force:
        raise OutputExists(f"{path} exists already.", hint="Choose another name, or pass --force to replace it.")
    scratch = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with closing(sqlite3.connect(scratch, isolation_level=None)) as database:
            pragmas = ("journal_mode = OFF", "synchronous = OFF", f"application_id = {APPLICATION_ID}")
            for pragma in (*pragmas, f"user_version = {version}"):
                database.execute(f"PRAGMA {pragma}")
            database.execute("BEGIN")
            for statement in SCHEMAS[version].values():
                database.execute(statement)
            yield database
            database.execute("COMMIT")
        scratch.replace(path)
    except (sqlite3.OperationalError, OSError) as error:
        hint = "Name a file in a folder that you can write to, on a disk with room for it."
        raise RequestError(f"Cannot write {path}: {error}.", hint=hint) from None
    finally:
        with suppress(OSError):
            scratch.unlink()


@contextmanager
def opened(path: Path) -> Iterator[tuple[sqlite3.Connection, int]]:
    """Open a recording and return it with its layout; raise BadRecording if it is not valid."""
    if not path.is_file():
        raise BadRecording(f"There is no recording at {path}.", hint="Make one with: tonnage run -o FILE SCRIPT")
    if not path.stat().st_size:  # an empty file is a valid database to SQLite
        raise BadRecording(f"{path} is empty.", hint=REMAKE)
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as database:
            database.text_factory = lambda data: printable_lines(data.decode("utf-8"))
            database.execute("PRAGMA trusted_schema = OFF")
            (application,) = database.execute("PRAGMA application_id").fetchone()
            version: int
            (version,) = database.execute("PRAGMA user_version").fetchone()
            if application != APPLICATION_ID:
                raise BadRecording(f"{path} is a database, but not a recording of Tonnage.", hint=REMAKE)
            if version not in SCHEMAS:
                problem = f"{path} has layout {version}; this Tonnage reads layouts {', '.join(map(str, SCHEMAS))}."
                raise BadRecording(problem, hint="Upgrade Tonnage." if version > max(SCHEMAS) else REMAKE)
            found = dict(database.execute("SELECT name, sql FROM sqlite_schema WHERE sql IS NOT NULL"))
            if found != SCHEMAS[version]:
                raise BadRecording(f"{path} claims to be a recording, but its tables are others.", hint=REMAKE)
            check_columns(database)
            yield database, version
    except (sqlite3.Error, ValueError, TypeError, LookupError, ArithmeticError) as error:
        raise BadRecording(f"{path} is not a readable recording: {error}.", hint=REMAKE) from error


def is_database(path: Path) -> bool:
    """Whether a file starts with SQLite's magic bytes."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC
