"""Files that are hostile or broken, by name: each must be refused in one line, and none may run anything.

    .venv/bin/python tests/hostile_snapshots.py FOLDER

writes them all, for a look at them by hand.
"""

import copy
import gzip
import io
import json
import pickle
import sqlite3
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from snapshots import small_snapshot

CANARY = "canary"
COMMAND = f"touch {CANARY}".encode()
MANY = 3_000_000


class Evil:
    """Pickled, it is a call."""

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, (COMMAND.decode(),)


def _text(value: bytes) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value


SYSTEM = b"cos\nsystem\n"
CALL = _text(COMMAND) + b"\x85R"


def code_execution() -> Iterator[tuple[str, bytes]]:
    """Every opcode that imports, calls, builds or asks its caller."""
    argument = b"(" + _text(COMMAND) + b"t"
    bodies = {
        "global": SYSTEM,
        "reduce": SYSTEM + argument + b"R",
        "stack_global": _text(b"os") + _text(b"system") + b"\x93" + CALL,
        "inst": b"(" + _text(COMMAND) + b"ios\nsystem\n",
        "obj": b"(" + SYSTEM + _text(COMMAND) + b"o",
        "newobj": SYSTEM + argument + b"\x81",
        "newobj_ex": SYSTEM + argument + b"}\x92",
        "build": SYSTEM + b"}" + _text(b"x") + b"Ksb",
        "build_data": b"}}b",
        "ext1": b"\x82\x01",
        "ext2": b"\x83\x01\x00",
        "ext4": b"\x84\x01\x00\x00\x00",
        "persid": b"Pos.system\n",
        "binpersid": _text(COMMAND) + b"Q",
        "next_buffer": b"\x97",
        "readonly_buffer": b"\x97\x98",
        "dup": b"N2",
        "pop": b"NN0",
        "pop_mark": b"N(N1",
    }
    for name, body in bodies.items():
        yield f"runs-{name}", b"\x80\x04" + body + b"."
    for name, text in {
        "int": b"I1\n",
        "long": b"L1L\n",
        "float": b"F1.5\n",
        "string": b"S'a'\n",
        "get": b"Ng0\n",
    }.items():
        yield f"text-{name}", b"\x80\x02" + text + b"."
    yield "runs-protocol-0", pickle.dumps(Evil(), 0)
    for protocol in range(1, 6):
        snapshot = small_snapshot()
        snapshot["device_traces"][0][0]["action"] = Evil()
        yield f"runs-in-an-event-{protocol}", pickle.dumps(snapshot, protocol)
        yield f"runs-in-the-end-{protocol}", pickle.dumps(small_snapshot() | {"more": Evil()}, protocol)


def bombs() -> Iterator[tuple[str, bytes]]:
    """What grows out of proportion."""
    head, mark = b"\x80\x04", b"("
    yield "nested-lists", head + b"]" * MANY + b"a" * (MANY - 1) + b"."
    yield "nested-tuples", head + b"N" + b"\x85" * 3 * MANY + b"."
    yield "nested-dicts", head + b"}" * MANY + b"."
    yield "nested-marks", head + mark * MANY + b"."
    yield "waiting-values", head + b"N" * 12 * MANY + b"."
    yield "empty-appends", head + b"]" + b"(e" * MANY + b"."
    yield "empty-setitems", head + b"}" + b"(u" * MANY + b"."
    yield "one-memo-entry-over-and-over", head + b"N" + b"q\x00" * MANY + b"."
    yield "memo-entries", head + b"]" + b"\x94" * 20_000_000 + b"."
    yield "memo-index", b"\x80\x02]r\xff\xff\xff\xff."
    yield "frames-without-end", head + (b"\x95" + bytes(8)) * 2_000_000 + b"N."
    yield "long-list", head + b"](" + b"N" * 60_000_000 + b"e."
    yield "gzip-of-zeros", gzip.compress(bytes(100_000_000), 1)
    yield "gzip-of-nothing", gzip.compress(head + b"N" * 50_000_000 + b".", 1)
    yield "gzip-of-lists", gzip.compress(head + b"](" + b"]" * 20_000_000 + b"e.", 1)
    yield "gzip-of-gzip", gzip.compress(gzip.compress(bytes(10_000_000)))
    yield "many-integers", head + b"](" + b"M\xff\xff" * 20_000_000 + b"e."
    yield "many-strings", head + b"](" + b"".join(b"\x8c\x04%04x" % (i & 0xFFFF) for i in range(MANY)) * 2 + b"."
    yield "long-string", head + b"\x8d" + struct.pack("<Q", 2**62) + b"x."
    yield "long-unicode", head + b"X" + struct.pack("<I", 2**31) + b"x" * 1000 + b"."
    yield "long-bytes", head + b"B" + struct.pack("<I", 2**31) + b"x" * 1000 + b"."
    yield "negative-string", b"\x80\x02T" + struct.pack("<i", -5) + b"x."
    yield "long-integer", head + b"\x8b" + struct.pack("<I", 2**30) + b"x" * 1000 + b"."
    yield "many-shapes", head + b"](" + b"".join(b"}\x8c\x06%06dNs" % i for i in range(200_000)) + b"e."
    yield "many-keys", head + b"}(" + b"".join(b"\x8c\x06%06dN" % i for i in range(100_000)) + b"u."
    yield from _laughs(head)


def _laughs(head: bytes) -> Iterator[tuple[str, bytes]]:
    """Little that refers to itself much."""
    levels = b"]\x94(" + b"NN" * 5 + b"e"
    for level in range(40):
        levels += b"]\x94(" + (b"h" + bytes([level])) * 10 + b"e"
    yield "laughing-lists", head + levels + b"\x85."
    segment = b"}\x94(" + _text(b"address") + b"K\x00" + _text(b"total_size") + b"K\x08" + _text(b"blocks") + b"]u"
    end = _text(b"device_traces") + b"]u."
    yield (
        "one-segment-over-and-over",
        head + b"}(" + _text(b"segments") + b"](" + segment + b"h\x00" * MANY + b"e" + end,
    )
    event = b"}\x94(" + _text(b"action") + _text(b"oom") + _text(b"size") + b"K\x01" + _text(b"device_free") + b"K\x01u"
    trace = b"](" + event + b"h\x00" * 6_000_000 + b"e\x85"
    lists = _text(b"segments") + b"]" + _text(b"device_traces")
    yield "one-event-over-and-over", head + b"}(" + lists + trace + b"u."
    deep = b"}(" + _text(b"action") + _text(b"oom") + _text(b"size") + b"K\x01" + _text(b"device_free") + b"K\x01"
    deep += _text(b"frames") + b"](" + b"N" * MANY + b"eu"
    yield "a-stack-without-end", head + b"}(" + lists + b"]" + b"](" + deep + b"eau."


def cycles() -> Iterator[tuple[str, bytes]]:
    """What contains itself."""
    itself: list[Any] = []
    itself.append(itself)
    root: dict[str, Any] = {}
    root.update(segments=itself, device_traces=itself)
    yield "a-list-in-itself", pickle.dumps(itself, 4)
    yield "lists-in-themselves", pickle.dumps(root, 4)
    root = {"segments": []}
    root["device_traces"] = [[root]]
    yield "a-snapshot-as-its-event", pickle.dumps(root, 2)
    event = small_snapshot()["device_traces"][0][0]
    event["frames"] = [event]
    yield "an-event-as-its-frame", pickle.dumps({"segments": [], "device_traces": [[event]]}, 5)


def broken() -> Iterator[tuple[str, bytes]]:
    """What is no snapshot, or not all of one."""
    whole = pickle.dumps(small_snapshot(), 4)
    yield "empty", b""
    yield "one-byte", b"\x80"
    yield "no-body", b"\x80\x04"
    yield "stops-at-once", b"\x80\x04."
    yield "two-values", b"\x80\x04NN."
    yield "an-open-mark", b"\x80\x04(N."
    yield "unknown-opcode", b"\x80\x04\xff."
    yield "nothing-to-append-to", b"\x80\x04Na."
    yield "a-key-of-a-list", b"\x80\x04]\x8c\x01aNs."
    yield "a-list-as-a-key", b"\x80\x04}]Ns."
    yield "a-number-as-a-key", b"\x80\x04}K\x01Ns."
    yield "a-key-without-a-value", b"\x80\x04}(\x8c\x01au."
    yield "an-unknown-memo-entry", b"\x80\x04h\x07."
    yield "text", b"it is only text\n" * 100
    yield "json", json.dumps(small_snapshot()).encode()
    yield "noise", bytes(range(256)) * 40
    yield "zip", _zip()
    yield "database", _database()
    for protocol in (0, 1, 6, 255):
        yield f"protocol-{protocol}", b"\x80" + bytes([protocol]) + whole[2:]
    yield "old-protocol", pickle.dumps(small_snapshot(), 0)
    packed = gzip.compress(whole)
    yield "gzip-cut", packed[: len(packed) // 2]
    yield "gzip-head-only", packed[:10]
    yield "gzip-bent", packed[:20] + bytes(20) + packed[40:]
    for part in range(1, 20):
        yield f"cut-{part:02}", whole[: len(whole) * part // 20]


def _zip() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))
    return file.getvalue()


def _database() -> bytes:
    with sqlite3.connect(":memory:") as database:
        database.execute("CREATE TABLE t (a)")
        return database.serialize()


WRONG: tuple[Any, ...] = (-1, 2**63, 1.5, "x", b"x", [], {"a": 1}, (1,), True)
TEXTS: tuple[Any, ...] = (1, 1.5, b"x", [], {"a": 1}, None)


def wrong_types() -> Iterator[tuple[str, bytes]]:
    """A snapshot with one field that is not what it should be."""
    lists: tuple[Any, ...] = (1, "x", {"a": 1}, 1.5)
    event: Callable[[Any], Any] = lambda s: s["device_traces"][0][1]  # noqa: E731
    fields: list[tuple[str, Callable[[Any], Any], str, tuple[Any, ...]]] = [
        ("event", event, "action", TEXTS),
        ("event", event, "addr", (*WRONG, None)),
        ("event", event, "size", (*WRONG, None)),
        ("event", event, "stream", WRONG[1:]),
        ("event", event, "time_us", WRONG[1:]),
        ("event", event, "frames", (*lists, [1], [[]], [{}], [{"name": "f"}])),
        ("segment", lambda s: s["segments"][0], "address", (*WRONG, None)),
        ("segment", lambda s: s["segments"][0], "total_size", (*WRONG, None, 0)),
        ("segment", lambda s: s["segments"][0], "device", WRONG[1:]),
        ("segment", lambda s: s["segments"][0], "stream", WRONG[1:]),
        ("segment", lambda s: s["segments"][0], "is_expandable", (1, "yes", None)),
        ("segment", lambda s: s["segments"][0], "blocks", (*lists, [1], [{}])),
        ("block", lambda s: s["segments"][0]["blocks"][0], "size", (*WRONG, None, 0, 2**40)),
        ("block", lambda s: s["segments"][0]["blocks"][0], "address", (*WRONG, 0)),
        ("block", lambda s: s["segments"][0]["blocks"][0], "requested_size", WRONG),
        ("block", lambda s: s["segments"][0]["blocks"][0], "state", TEXTS),
        ("block", lambda s: s["segments"][0]["blocks"][0], "frames", lists),
        ("frame", lambda s: event(s)["frames"][0], "name", TEXTS),
        ("frame", lambda s: event(s)["frames"][0], "filename", TEXTS),
        ("frame", lambda s: event(s)["frames"][0], "line", (1.5, "x", None, [], True)),
        ("annotation", lambda s: s["external_annotations"][0], "name", TEXTS),
        ("annotation", lambda s: s["external_annotations"][0], "stage", TEXTS),
        ("annotation", lambda s: s["external_annotations"][0], "time_us", WRONG[1:]),
        ("settings", lambda s: s["allocator_settings"], "PYTORCH_CUDA_ALLOC_CONF", (1, ["x"], "a:b:c", "x\x1b[2J:1")),
        ("settings", lambda s: s["allocator_settings"], "expandable_segments", (1, "x", None)),
        ("snapshot", lambda s: s, "segments", (*lists, None, [1], [[]])),
        ("snapshot", lambda s: s, "device_traces", (*lists, None, [1], [[1]], [[[]]])),
        ("snapshot", lambda s: s, "allocator_settings", (1, "x", [])),
        ("snapshot", lambda s: s, "external_annotations", (*lists, [1])),
    ]
    for where, find, key, values in fields:
        for number, value in enumerate(values):
            snapshot = copy.deepcopy(small_snapshot())
            find(snapshot)[key] = value
            yield f"wrong-{where}-{key}-{type(value).__name__}-{number}", pickle.dumps(snapshot, 2 + number % 4)
    for key in ("segments", "device_traces"):
        snapshot = small_snapshot()
        del snapshot[key]
        yield f"without-{key}", pickle.dumps(snapshot, 3)
    snapshot = small_snapshot()
    snapshot["segments"].append(copy.deepcopy(snapshot["segments"][0]))
    yield "segments-that-overlap", pickle.dumps(snapshot, 4)
    for value in (None, [], "x", 1, {}, {"a": 1}):
        yield f"not-a-snapshot-{type(value).__name__}-{bool(value)}", pickle.dumps(value, 4)


KINDS = (code_execution, bombs, cycles, broken, wrong_types)


def corpus() -> Iterator[tuple[str, bytes]]:
    """All of them."""
    for kind in KINDS:
        yield from kind()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for name, data in corpus():
        (folder / f"{name}.pickle").write_bytes(data)
