"""Files of recordings with numbers that no run wrote."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from tonnage.errors import BadRecording
from tonnage.recording import open_cluster, open_recording
from tonnage.recording.cluster import ended_in_error

# What JSON can hold where a number of a field of ours belongs; 1e999 is read as infinite.
STRANGE_NUMBERS = (
    "NaN", "Infinity", "-Infinity", "1e999", "-1", "-1e300", "0.5", str(2**63), str(2**80), "1" + "0" * 400,
    '"7"', "true", "null", "[]", "[Infinity]", "{}", '{"a": Infinity}',
)  # fmt: skip


def strange_files(path: Path, table: str, column: str, key: str) -> Iterator[tuple[str, str]]:
    """Write every strange number into every cell of a column in turn; yield the cell's key and the number."""
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("PRAGMA synchronous = OFF")
        database.execute("PRAGMA journal_mode = MEMORY")
        cells = database.execute(f"SELECT {key}, {column} FROM {table}").fetchall()
        for name, value in cells:
            for number in STRANGE_NUMBERS:
                statement = f"UPDATE {table} SET {column} = ? WHERE {key} = ?"
                database.execute(statement, (number, name))
                yield str(name), number
            database.execute(statement, (value, name))


def opens_or_says_why(path: Path) -> str:
    """Open a file in every way; an error of ours is one sentence."""

    problem = ""
    for read in (open_recording, open_cluster, ended_in_error):
        try:
            read(path)
        except BadRecording as error:
            problem = str(error)
            assert len(problem.removeprefix(str(path))) < 300 and "\n" not in problem
    return problem
