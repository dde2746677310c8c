"""A recording as one SQLite file (see `layout`); in that of a cluster, each row begins with its rank."""

import json
import reprlib
import sqlite3
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, astuple, fields, replace
from pathlib import Path
from typing import Any

from tonnage.clock.captured import CapturedCall, CapturedStep
from tonnage.errors import BadRecording
from tonnage.ledger import Category
from tonnage.recording.beyond import as_kept, as_read
from tonnage.recording.host import HOST_KEY, host_memory
from tonnage.recording.layout import (
    LAYOUT_VERSION,
    is_of_cluster,
    is_rank,
    is_rank_ranges,
    is_shape,
    is_word_list,
    opened,
    record_of,
    written,
)
from tonnage.recording.recording import Recording
from tonnage.recording.records import Allocation, Dependence, FailedRequest, Header, Mark, Note, SegmentEvent, StandIn
from tonnage.recording.writes import WRITES_KEY, script_writes
from tonnage.untrusted import Unreadable, parse_json

_MOST_BYTES = 2**28
# Keys of the header's table that are no fields of the header; older files lack them.
_DEPENDENCE_KEY, _DECIDES_KEY = "depends_on", "stand_ins_decide"


def write_recording(path: str | Path, recording: Recording, *, force: bool = False) -> None:
    """Write the file atomically; raise OutputExists if it exists, unless `force`."""
    recording = as_kept(recording)
    with written(Path(path), LAYOUT_VERSION, force=force) as database:
        contexts: Contexts = {}
        insert_run(database, recording, contexts)
        insert_contexts(database, contexts)


def read_recording(path: str | Path, rank: int | None = None) -> Recording:
    """Read one of our files; of a cluster one rank (None: the first to run out of memory, else the one that needs most)."""
    path = Path(path)
    with opened(path) as (database, version):
        if not is_of_cluster(version):
            if rank is None:
                return as_read(read_run(database))
            raise BadRecording(f"{path} holds the run of one GPU, not that of rank {rank}.", hint="Leave out the rank.")
        ranks = list(_rank_rows(database))
        if not ranks:
            problem = f"{path} is of a cluster of which no rank reported."
            raise BadRecording(problem, hint="See why with: tonnage show FILE")
        if rank is None:
            (value,) = database.execute("SELECT value FROM cluster WHERE key = 'worst'").fetchone()
            rank = decoded(value)
            if not is_rank(rank):
                raise ValueError(f"its worst rank is {reprlib.repr(rank)}")
        # A rank's events are stored under an identical one, or its representative.
        for kept, summary in ranks:
            if any(first <= rank <= last for first, last in summary["stands_for"]):
                return read_run(database, kept)
        held = ", ".join(str(summary["rank"]) for _, summary in ranks)
        raise BadRecording(f"{path} does not hold rank {rank}.", hint=f"Name one that ran: {held}.")


def _rank_rows(database: sqlite3.Connection) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each rank's summary, its numbers checked, with the rank whose events stand for its own."""
    for kept, value in database.execute("SELECT kept, summary FROM rank"):
        summary = decoded(value)
        if not isinstance(summary, dict) or not is_rank(summary.get("rank")):
            raise ValueError(f"it has a rank {reprlib.repr(summary)}")
        if not is_rank_ranges(summary.get("stands_for")):
            problem = f"stands for {reprlib.repr(summary.get('stands_for'))}"
            raise ValueError(f"its rank {summary['rank']} {problem}")
        yield kept, summary


def decoded(value: str) -> Any:
    """Decode a cell that contains JSON."""
    try:
        return parse_json(value.encode())
    except Unreadable as error:
        raise ValueError(f"a value in it {error}") from None


_Context = tuple[Category, str, str, str, str, tuple[str, ...], tuple[int, ...] | None, str]
Contexts = dict[_Context, int]


def insert_run(
    database: sqlite3.Connection, recording: Recording, contexts: Contexts, of_rank: tuple[int, ...] = ()
) -> None:
    """Insert the rows of one run except its contexts, which runs may share; each row begins with `of_rank`."""

    def allocation_row(a: Allocation) -> tuple[Any, ...]:
        context = (a.category, a.operator, a.module, a.phase, a.line, a.stack, a.shape, a.dtype)
        number = contexts.setdefault(context, len(contexts))
        return a.index, a.address, a.requested_bytes, a.block_bytes, a.stream, a.born, a.died, a.step, number

    def insert(table: str, width: int, rows: Iterable[tuple[Any, ...]]) -> None:
        values = ", ".join("?" * (len(of_rank) + width))
        database.executemany(f"INSERT INTO {table} VALUES ({values})", ((*of_rank, *row) for row in rows))

    insert("allocation", 9, map(allocation_row, recording.allocations))
    insert("header", 2, ((key, json.dumps(value)) for key, value in asdict(recording.header).items()))
    insert("header", 2, ((HOST_KEY, json.dumps(asdict(host))) for host in [recording.host] if host))
    insert("header", 2, ((WRITES_KEY, json.dumps(asdict(writes))) for writes in [recording.writes] if writes))
    insert("segment", 5, map(astuple, recording.segments))
    insert("mark", 3, map(astuple, recording.marks))
    insert("stand_in", 4, (astuple(stand_in)[:4] for stand_in in recording.stand_ins))
    if any(stand_in.decides for stand_in in recording.stand_ins):
        insert("header", 2, [(_DECIDES_KEY, json.dumps([stand_in.decides for stand_in in recording.stand_ins]))])
    if recording.dependence:
        insert("header", 2, [(_DEPENDENCE_KEY, json.dumps(asdict(recording.dependence)))])
    insert("note", 4, map(astuple, recording.notes))
    insert("oom", 1, ((json.dumps(asdict(oom)),) for oom in [recording.oom] if oom))
    insert("captured", 1, ((packed(step),) for step in [recording.captured] if step))


def insert_contexts(database: sqlite3.Connection, contexts: Contexts) -> None:
    """Insert each context (what many blocks have in common) once."""
    rows = []
    for (category, operator, module, phase, line, stack, shape, dtype), number in contexts.items():
        encoded = (json.dumps(stack), json.dumps(shape))
        rows.append((number, str(category), operator, module, phase, line, *encoded, dtype))
    database.executemany(f"INSERT INTO context VALUES ({', '.join('?' * 9)})", rows)


def read_run(database: sqlite3.Connection, of_rank: int | None = None) -> Recording:
    """Read the rows of one run (None: the only one in the file) as a recording."""

    def rows(table: str, order: str = "rowid") -> Iterator[tuple[Any, ...]]:
        if of_rank is None:
            return iter(database.execute(f"SELECT * FROM {table} ORDER BY {order}"))
        found = database.execute(f"SELECT * FROM {table} WHERE rank = ? ORDER BY {order}", (of_rank,))
        return (row[1:] for row in found)

    header = dict(rows("header"))
    host = header.pop(HOST_KEY, None)  # missing in older files
    writes = header.pop(WRITES_KEY, None)  # missing in older files
    dependence = header.pop(_DEPENDENCE_KEY, None)
    tests = decoded(header.pop(_DECIDES_KEY, "[]"))
    if not is_word_list(tests):
        raise ValueError("it says of its stand-ins what no run says")
    lacking = {"command": [], "folder": "", "training": {}}  # missing in older files
    values = lacking | {key: decoded(value) for key, value in header.items()}
    # Decode each context once, however many blocks share it.
    contexts: dict[int, _Context] = {}
    for number, category, *words, stack, shape, dtype in database.execute("SELECT * FROM context"):
        extents, frames = decoded(shape), decoded(stack)
        if not is_shape(extents) or not is_word_list(frames):
            raise ValueError(f"it has a tensor of shape {reprlib.repr(extents)}, made at {reprlib.repr(frames)}")
        decoded_shape = None if extents is None else tuple(extents)
        contexts[number] = (Category(category), *words, tuple(frames), decoded_shape, dtype)
    allocations = []
    for index, address, requested, block, stream, born, died, step, number in rows("allocation", '"index"'):
        category, operator, module, phase, line, stack, shape, dtype = contexts[number]
        allocations.append(
            Allocation(
                index, address, requested, block, stream, born, died, category,
                operator, module, phase, step, line, stack, shape, dtype,
            )
        )  # fmt: skip
    # Older files lack this table.
    is_captured = database.execute("SELECT 1 FROM sqlite_schema WHERE name = 'captured'").fetchone() is not None
    marks = [Mark(*row) for row in rows("mark", "sequence, rowid")]
    for mark in marks:
        if mark.kind == "step" and not mark.name.isdecimal():
            raise ValueError(f"it has a step {mark.name!r}")
    stand_ins = [StandIn(*row) for row in rows("stand_in")]
    stand_ins[: len(tests)] = [
        replace(stand_in, decides=test) for stand_in, test in zip(stand_ins, tests, strict=False)
    ]
    return Recording(
        header=record_of(Header, values, "header"),
        allocations=allocations,
        segments=[SegmentEvent(*row) for row in rows("segment", "sequence")],
        marks=marks,
        stand_ins=stand_ins,
        notes=[Note(*row) for row in rows("note")],
        oom=next((record_of(FailedRequest, decoded(value), "failed request") for (value,) in rows("oom")), None),
        host=host_memory(decoded(host)) if host else None,
        writes=script_writes(decoded(writes)) if writes else None,
        dependence=record_of(Dependence, decoded(dependence), "dependence") if dependence else None,
        captured=next((unpacked(data) for (data,) in rows("captured")), None) if is_captured else None,
    )


def packed(step: CapturedStep) -> bytes:
    """Encode a step for a file."""
    values = {field.name: getattr(step, field.name) for field in fields(step)}
    values["calls"] = [asdict(call) for call in step.calls]
    return zlib.compress(json.dumps(values, separators=(",", ":")).encode())


def unpacked(data: bytes) -> CapturedStep:
    """Decode a packed step; raise ValueError if it is not valid."""
    inflater = zlib.decompressobj()
    try:
        values = parse_json(inflater.decompress(data, _MOST_BYTES))
    except (zlib.error, Unreadable) as error:
        raise ValueError(f"its step cannot be read: {error}") from None
    step = record_of(
        CapturedStep, values, "step", calls=lambda rows: tuple(record_of(CapturedCall, row, "call") for row in rows)
    )
    length = len(step.sequence)
    if not length == len(step.depths) == len(step.threads) or not all(n < len(step.calls) for n in step.sequence):
        raise ValueError("its step names calls that there are not")
    return step
