"""The layout of a recording's file, and how it is opened. Nothing in a file is trusted.

`application_id` marks the file as ours, and `user_version` gives its layout: 5 is the run of one GPU, 6 that of a
cluster; 3 and 4 lack streams and collectives in captured steps, 1 and 2 lack captured steps. A file whose tables are
not exactly those of its layout is refused before any row is read.

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
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from tonnage.errors import BadRecording, OutputExists, RequestError
from tonnage.recording.checks import check_columns
from tonnage.untrusted import printable_lines

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
    if path.exists() and not force:
        raise OutputExists(f"{path} exists already.", hint="Choose another name, or pass --force to replace it.")
    scratch = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with closing(sqlite3.connect(scratch, isolation_level=None)) as database:
            pragmas = {
                "journal_mode": "OFF",
                "synchronous": "OFF",
                "application_id": APPLICATION_ID,
                "user_version": version,
            }
            for pragma, value in pragmas.items():
                database.execute(f"PRAGMA {pragma} = {value}")
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
            version = _layout_of(database, path)
            check_columns(database)
            yield database, version
    except (sqlite3.Error, ValueError, TypeError, KeyError, IndexError) as error:
        raise BadRecording(f"{path} is not a readable recording: {error}.", hint=REMAKE) from error


def _layout_of(database: sqlite3.Connection, path: Path) -> int:
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
    return version


def is_database(path: Path) -> bool:
    """Whether a file starts with SQLite's magic bytes."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC
