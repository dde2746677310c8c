"""A recording as one SQLite file: safe to open, quick to query.

| table      | a row is                                             |
|------------|------------------------------------------------------|
| header     | one key of the header, its value as JSON             |
| context    | what many blocks have in common: operator, line, ... |
| allocation | a block, with the number of its context              |
| segment, mark, stand_in, note, oom | the record of that name      |

The file says that it is ours (`application_id`) and which layout it has (`user_version`). Reading trusts nothing: a
file whose tables are not exactly these is refused before any of its rows is looked at.
"""

import json
import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, astuple, fields
from pathlib import Path
from typing import Any, get_args

from tonnage.errors import BadRecording, OutputExists
from tonnage.ledger import Category
from tonnage.recording.recording import Recording
from tonnage.recording.records import (
    Allocation,
    Header,
    Mark,
    MarkKind,
    Note,
    Outcome,
    OutOfMemory,
    SegmentEvent,
    Source,
    StandIn,
)

APPLICATION_ID = 0x544F4E4E  # "TONN"
LAYOUT_VERSION = 1

_SCHEMA = {
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
}


def write_recording(path: Path, recording: Recording, *, force: bool = False) -> None:
    """Write all or nothing; an existing file stays as it is unless `force`."""
    if path.exists() and not force:
        raise OutputExists(f"{path} exists already.", hint="Choose another name, or pass --force to replace it.")
    scratch = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with closing(sqlite3.connect(scratch, isolation_level=None)) as database:
            _write(database, recording)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def read_recording(path: Path) -> Recording:
    """Read a file that `write_recording` wrote; anything else is refused with the reason."""
    if not path.is_file():
        raise BadRecording(f"There is no recording at {path}.", hint="Make one with: tonnage run -o FILE SCRIPT")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as database:
            _check_is_ours(database, path)
            return _read(database)
    except (sqlite3.Error, ValueError, TypeError, KeyError, IndexError) as error:
        raise BadRecording(f"{path} is not a readable recording: {error}.", hint=_REMAKE) from error


_REMAKE = "Make it again with: tonnage run -o FILE SCRIPT"


_Context = tuple[Category, str, str, str, str, tuple[str, ...], tuple[int, ...] | None, str]


def _write(database: sqlite3.Connection, recording: Recording) -> None:
    database.execute("PRAGMA journal_mode = OFF")
    database.execute("PRAGMA synchronous = OFF")
    database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    database.execute(f"PRAGMA user_version = {LAYOUT_VERSION}")
    database.execute("BEGIN")
    for statement in _SCHEMA.values():
        database.execute(statement)
    contexts: dict[_Context, int] = {}
    _insert(database, "allocation", 9, _allocation_rows(recording.allocations, contexts))
    _insert(database, "context", 9, (_context_row(number, context) for context, number in contexts.items()))
    _insert(database, "header", 2, ((key, json.dumps(value)) for key, value in asdict(recording.header).items()))
    _insert(database, "segment", 5, map(astuple, recording.segments))
    _insert(database, "mark", 3, map(astuple, recording.marks))
    _insert(database, "stand_in", 4, map(astuple, recording.stand_ins))
    _insert(database, "note", 4, map(astuple, recording.notes))
    _insert(database, "oom", 1, ((json.dumps(asdict(oom)),) for oom in [recording.oom] if oom))
    database.execute("COMMIT")


def _insert(database: sqlite3.Connection, table: str, width: int, rows: Iterable[tuple[Any, ...]]) -> None:
    database.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * width)})", rows)


def _allocation_rows(allocations: Iterable[Allocation], contexts: dict[_Context, int]) -> Iterator[tuple[Any, ...]]:
    """Rows of blocks; each new context gets the next number."""
    for a in allocations:
        context = (a.category, a.operator, a.module, a.phase, a.line, a.stack, a.shape, a.dtype)
        number = contexts.setdefault(context, len(contexts))
        yield a.index, a.address, a.requested_bytes, a.block_bytes, a.stream, a.born, a.died, a.step, number


def _context_row(number: int, context: _Context) -> tuple[Any, ...]:
    category, operator, module, phase, line, stack, shape, dtype = context
    return number, str(category), operator, module, phase, line, json.dumps(stack), json.dumps(shape), dtype


def _check_is_ours(database: sqlite3.Connection, path: Path) -> None:
    database.execute("PRAGMA trusted_schema = OFF")
    (application,) = database.execute("PRAGMA application_id").fetchone()
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        raise BadRecording(f"{path} is a database, but not a recording of Tonnage.", hint=_REMAKE)
    if version != LAYOUT_VERSION:
        problem = f"{path} has layout {version}; this Tonnage reads layout {LAYOUT_VERSION}."
        raise BadRecording(problem, hint="Upgrade Tonnage." if version > LAYOUT_VERSION else _REMAKE)
    found = dict(database.execute("SELECT name, sql FROM sqlite_schema WHERE sql IS NOT NULL"))
    if found != _SCHEMA:
        raise BadRecording(f"{path} claims to be a recording, but its tables are others.", hint=_REMAKE)


def _read(database: sqlite3.Connection) -> Recording:
    return Recording(
        header=_read_header(database),
        allocations=list(_read_allocations(database)),
        segments=[SegmentEvent(*row) for row in database.execute("SELECT * FROM segment ORDER BY sequence")],
        marks=[_mark(*row) for row in database.execute("SELECT * FROM mark ORDER BY sequence, rowid")],
        stand_ins=[StandIn(*row) for row in database.execute("SELECT * FROM stand_in ORDER BY rowid")],
        notes=[Note(*row) for row in database.execute("SELECT * FROM note ORDER BY rowid")],
        oom=next((_read_oom(value) for (value,) in database.execute("SELECT value FROM oom")), None),
    )


def _read_header(database: sqlite3.Connection) -> Header:
    values = {key: json.loads(value) for key, value in database.execute("SELECT key, value FROM header")}
    if set(values) != {f.name for f in fields(Header)}:
        raise ValueError("its header is incomplete")
    header = Header(**values | {"arguments": tuple(values["arguments"])})
    _check_header(header)
    return header


def _check_header(header: Header) -> None:
    """What reports rely on: each field is of its kind."""
    plain = Header(gpu="", gpu_name="", capacity_bytes=0, torch_modelled="", torch_installed="")
    for field in fields(Header):
        value, kind = getattr(header, field.name), type(getattr(plain, field.name))
        if not isinstance(value, (int, float) if kind is float else kind):
            raise ValueError(f"its header's {field.name} is {value!r}")
    if header.outcome not in get_args(Outcome) or header.source not in get_args(Source):
        raise ValueError(f"its header says {header.outcome!r} of {header.source!r}")


def _mark(sequence: int, kind: MarkKind, name: str) -> Mark:
    if kind not in get_args(MarkKind) or (kind == "step" and not name.isdecimal()):
        raise ValueError(f"it has a mark {kind!r} {name!r}")
    return Mark(sequence, kind, name)


def _read_oom(value: str) -> OutOfMemory:
    values = json.loads(value)
    shape = values["shape"]
    return OutOfMemory(**values | {"stack": tuple(values["stack"]), "shape": None if shape is None else tuple(shape)})


def _read_allocations(database: sqlite3.Connection) -> Iterator[Allocation]:
    """Each context is decoded once, however many blocks have it."""
    contexts = {row[0]: _context(*row[1:]) for row in database.execute("SELECT * FROM context")}
    for row in database.execute('SELECT * FROM allocation ORDER BY "index"'):
        index, address, requested, block, stream, born, died, step, number = row
        category, operator, module, phase, line, stack, shape, dtype = contexts[number]
        yield Allocation(
            index, address, requested, block, stream, born, died, category,
            operator, module, phase, step, line, stack, shape, dtype,
        )  # fmt: skip


def _context(
    category: str, operator: str, module: str, phase: str, line: str, stack: str, shape: str, dtype: str
) -> _Context:
    extents = json.loads(shape)
    decoded_shape = None if extents is None else tuple(map(int, extents))
    return Category(category), operator, module, phase, line, tuple(json.loads(stack)), decoded_shape, dtype
