"""Ways to spoil a file, by what it is: trees (JSON, pickle, TOML), tables (CSV, SQLite), and bytes.

Everything is decided by the `Random` that is given, so that a number makes a file again.
"""

import csv
import gzip
import io
import json
import math
import os
import pickle
import sqlite3
import struct
import tomllib
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

Tree = Any
# Stands in a tree for brackets in brackets, deeper than a serialiser goes.
DEEP = "@nested@"
_NUMBERS = (0, 1, -1, 2, 7, 255, 2**31, -(2**31), 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63), 10**18, 10**30,
            10**400, 0.0, -0.0, 0.5, 1e-320, 1e18, 1e300, -1e308, math.inf, -math.inf, math.nan)  # fmt: skip
_TEXTS = ("", "x", "0", "-1", "1e999", "NaN", "null", "\0", "\ud800", "\x1b[2J\x1b]0;t\x07", "é→𝔘", "../../etc/passwd", "%s%n",
          "[bold]", "9" * 5000, "a" * 70_000, "a.b." * 3000, "1.0.*.layers", "\n\n", "step", "bf16")  # fmt: skip
_LONG = 20_000


def strange(rng: Random) -> Tree:
    """A value that hardly any field expects."""
    return rng.choice(
        (
            lambda: rng.choice(_NUMBERS),
            lambda: rng.choice(_TEXTS),
            lambda: rng.choice((None, True, False, [], {}, [None], [[]], {"": None}, [{}], {"a": {"b": []}})),
            lambda: rng.getrandbits(rng.choice((8, 16, 32, 48, 63))),
            lambda: [rng.choice(_NUMBERS) for _ in range(rng.randint(1, 40))],
            lambda: [0] * _LONG,
            lambda: f"{DEEP}{rng.choice((3, 30, 300, 900, 3_000, 100_000))}",
        )
    )()


def spoil_tree(tree: Tree, rng: Random) -> Tree:
    """Change one to four places of a tree, which may be its root."""
    box = [tree]
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        _spoil_one(box, rng)
    return box[0] if box else None


def _spoil_one(box: list[Tree], rng: Random) -> None:
    holder, key = _place(box, rng)
    value = holder[key]
    action = rng.randrange(10)
    if action < 4:
        holder[key] = strange(rng)
    elif action == 4 and isinstance(value, int | float) and not isinstance(value, bool):
        holder[key] = rng.choice(
            (-value, value + 1, value - 1, value * 2**20, str(value), value + 0.5 if abs(value) < 2**60 else 0.5)
        )
    elif action == 5:
        del holder[key]
    elif action == 6 and isinstance(holder, list):
        holder.insert(rng.randint(0, len(holder)), value)
    elif action == 7 and isinstance(value, list):
        rng.shuffle(value)
    elif action == 8 and isinstance(holder, dict):
        holder[rng.choice(_TEXTS[:12])] = holder.pop(key)
    else:
        other, at = _place(box, rng)
        holder[key] = other[at] if not isinstance(other[at], dict | list) else strange(rng)


def _place(box: list[Tree], rng: Random) -> tuple[Any, Any]:
    """A container and the key of one of its values, found by a walk from the root."""
    holder: Any = box
    key: Any = 0
    if not box:
        box.append(None)
    while isinstance(holder[key], dict | list) and holder[key] and rng.random() > 0.07:
        holder = holder[key]
        key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
    return holder, key


def spoil_bytes(data: bytes, rng: Random) -> bytes:
    """Flip, cut, repeat, insert or overwrite some bytes."""
    spoilt = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        at, action = rng.randrange(len(spoilt) + 1), rng.randrange(7)
        end = min(len(spoilt), at + rng.choice((1, 2, 4, 8, 64, 1024)))
        if action == 0 and at < len(spoilt):
            spoilt[at] ^= 1 << rng.randrange(8)
        elif action == 1 and rng.random() < 0.3:
            del spoilt[at:]
        elif action == 2:
            del spoilt[at:end]
        elif action == 3:
            spoilt[at:at] = spoilt[at:end] * rng.choice((1, 2, 50))
        elif action == 4:
            spoilt[at:end] = rng.randbytes(end - at)
        elif action == 5:
            spoilt[at:end] = rng.choice((b"\0", b"\xff")) * (end - at)
        else:
            spoilt[at : at + 8] = rng.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)).to_bytes(8, "little")
    return bytes(spoilt)


# ── JSON ──


def spoil_json(tree: Tree, rng: Random) -> bytes:
    """A spoilt tree as text, now and then with a key twice, in another encoding, or with something behind it."""
    text = _nested(json.dumps(spoil_tree(tree, rng)))
    if rng.random() < 0.05:
        at = text.find("{", rng.randrange(len(text) + 1)) + 1
        text = text[:at] + rng.choice(('"x": 1, "x": 2, ', '"size": null, ', '"": {}, ')) + text[at:]
    return _encoded(text, rng)


def _nested(text: str) -> str:
    """The text with brackets where `DEEP` stands for them."""
    while (at := text.find(f'"{DEEP}')) >= 0:
        end = text.find('"', at + 1)
        count = int(text[at + 1 + len(DEEP) : end])
        opening, closing = ("[", "]") if count % 2 else ('{"a":', "}")
        text = text[:at] + opening * count + "0" + closing * count + text[end + 1 :]
    return text


def _encoded(text: str, rng: Random) -> bytes:
    chance = rng.random()
    if chance < 0.9:
        return text.encode("utf-8", "surrogatepass")
    if chance < 0.94:
        return text.encode(rng.choice(("utf-16", "utf-8-sig", "utf-32")), "replace")
    if chance < 0.97:
        return text.encode("latin-1", "replace") + b"\xe9\xff"
    return text.encode("utf-8", "replace") + rng.choice((b"}", b"\0" * 10, b"[]", b" " * 100_000))


def packed(data: bytes, rng: Random) -> bytes:
    """Half of the time gzipped, and one of twenty such damaged."""
    if rng.random() < 0.5:
        return data
    squeezed = gzip.compress(data, 1)
    return spoil_bytes(squeezed, rng) if rng.random() < 0.1 else squeezed


# ── pickle, TOML, safetensors ──


def spoil_pickle(tree: Tree, rng: Random) -> bytes:
    """A spoilt tree as a pickle of any protocol that snapshots have."""
    spoilt = _shallow(spoil_tree(tree, rng))
    try:
        return packed(pickle.dumps(spoilt, rng.randint(2, 5)), rng)
    except RecursionError:
        return b"\x80\x04]."


def _shallow(tree: Tree) -> Tree:
    """Brackets in brackets that a pickler can still write, in place of `DEEP`."""
    if isinstance(tree, dict):
        return {key: _shallow(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_shallow(value) for value in tree]
    if isinstance(tree, str) and tree.startswith(DEEP):
        value: Tree = 0
        for _ in range(min(int(tree[len(DEEP) :]), 90)):
            value = [value]
        return value
    return tree


def spoil_toml(text: str, rng: Random) -> bytes:
    """A spoilt table of a card, as text."""
    tree = spoil_tree(tomllib.loads(text), rng)
    if not isinstance(tree, dict):
        return str(tree).encode("utf-8", "surrogatepass")
    lines = [f"{json.dumps(key)} = {_toml(value)}" for key, value in tree.items()]
    return _encoded(_nested("\n".join(lines)), rng)


def _toml(value: Tree) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float):
        return str(value)
    return json.dumps(value)


def spoil_safetensors(header: Tree, rng: Random) -> bytes:
    """A file that is all header: spoilt, or with a length that is not its own."""
    text = spoil_json(header, rng)
    length = (
        len(text) if rng.random() < 0.9 else rng.choice((0, 1, len(text) - 1, len(text) + 1, 2**31, 2**63, 2**64 - 1))
    )
    return struct.pack("<Q", length) + text


# ── tables ──


def spoil_csv(text: str, rng: Random) -> bytes:
    """A table with cells, lines or columns that are others."""
    rows = list(csv.reader(io.StringIO(text)))
    for _ in range(rng.choice((1, 2, 5))):
        row = rng.choice(rows)
        at, action = rng.randrange(len(row)) if row else 0, rng.randrange(8)
        if action < 4 and row:
            row[at] = str(strange(rng))
        elif action == 4:
            rows.remove(row)
        elif action == 5:
            rows.insert(rng.randrange(len(rows)), row)
        elif action == 6:
            for each in rows:
                del each[at : at + 1]
        else:
            for each in rows[1:]:
                each[at : at + 1] = [str(rng.choice((*_NUMBERS, *_TEXTS)))]
        rows = rows or [[]]
    out = io.StringIO()
    csv.writer(out, quoting=csv.QUOTE_ALL, escapechar="\\").writerows(rows)
    return _encoded(out.getvalue(), rng)


def spoil_database(data: bytes, rng: Random, scratch: Path) -> bytes:
    """A recording with cells, rows or tables that are others, written by SQLite itself."""
    scratch.write_bytes(data)
    database = sqlite3.connect(scratch, isolation_level=None)
    try:
        for _ in range(rng.choice((1, 1, 2, 3, 6))):
            _spoil_table(database, rng)
    except (sqlite3.Error, OverflowError, UnicodeError):
        pass  # not every value can stand in every column: what was changed so far counts
    finally:
        database.close()
    found = scratch.read_bytes()
    for left in scratch.parent.glob(f"{scratch.name}*"):
        left.unlink()
    return found


_STATEMENTS = (
    "PRAGMA user_version = 7", "PRAGMA user_version = 2", "PRAGMA user_version = 1", "PRAGMA application_id = 1",
    "CREATE TABLE more (a)", "CREATE VIEW seen AS SELECT 1",
)  # fmt: skip


def _spoil_table(database: sqlite3.Connection, rng: Random) -> None:
    tables = [name for (name,) in database.execute("SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name")]
    table = rng.choice(tables)
    columns = [(row[1], row[2]) for row in database.execute(f"PRAGMA table_info({table})")]
    rows = [row for (row,) in database.execute(f"SELECT rowid FROM {table}")]
    action = rng.randrange(20)
    if action == 0:
        database.execute(
            rng.choice((f"DROP TABLE {table}", f"DELETE FROM {table}", f"ALTER TABLE {table} ADD COLUMN z"))
        )
    elif action == 1:
        database.execute(rng.choice(_STATEMENTS))
    elif action == 2 and rows:
        database.execute(f"DELETE FROM {table} WHERE rowid = ?", (rng.choice(rows),))
    elif action == 3:
        values = [_cell(None, kind, rng) for _, kind in columns]
        database.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values))})", values)
    elif rows:
        column, kind = rng.choice(columns)
        row = rng.choice(rows)
        (before,) = database.execute(f'SELECT "{column}" FROM {table} WHERE rowid = ?', (row,)).fetchone()
        everywhere = "" if rng.random() < 0.1 else f" WHERE rowid = {row}"
        database.execute(f'UPDATE {table} SET "{column}" = ?{everywhere}', (_cell(before, kind, rng),))


def _cell(before: Any, kind: str, rng: Random) -> Any:
    """A value that the column takes: a number, a text, or JSON that is spoilt."""
    if kind == "INTEGER":
        near = before if isinstance(before, int) else 0
        number = rng.choice((rng.choice(_NUMBERS), near + 1, near - 1, -near, near << 20, None, rng.getrandbits(40)))
        return number if number is None or (math.isfinite(number) and abs(number) < 2**63) else 2**63 - 1
    try:
        return _nested(json.dumps(spoil_tree(json.loads(before), rng)))
    except (ValueError, TypeError, RecursionError):
        return rng.choice((*_TEXTS, None, json.dumps(rng.choice(_TEXTS)))) if rng.random() < 0.8 else str(strange(rng))


# ── files that are none ──


def _zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _sparse(path: Path) -> None:
    with path.open("r+b" if path.exists() else "wb") as file:
        file.truncate(8 * 2**30)


def _bomb(path: Path, piece: bytes, start: bytes = b"", size: int = 3 * 2**29) -> None:
    """A gzip that inflates to `size` bytes of one piece over and over: a MiB is packed once, and written many times."""
    packer = zlib.compressobj(1, zlib.DEFLATED, -15)
    chunk = piece * (2**20 // len(piece))
    head = gzip.compress(b"")[:10] + packer.compress(start) + packer.flush(zlib.Z_FULL_FLUSH)
    body = packer.compress(chunk) + packer.flush(zlib.Z_FULL_FLUSH)
    path.write_bytes(head + body * (size // len(chunk)) + packer.flush() + bytes(8))


_EVENT = b'{"ph":"X","cat":"kernel","name":"k","ts":1,"dur":1,"args":{}},'
STRANGE_FILES: dict[str, Callable[[Path], object]] = {
    "absent": lambda path: None,
    "empty": lambda path: path.write_bytes(b""),
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "link to nothing": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "zeros without end": _zeros,
    "sparse": _sparse,
    "no character": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "brackets": lambda path: path.write_bytes(b"[" * 5_000_000),
    "objects": lambda path: path.write_bytes(b'{"a":' * 1_000_000),
    "empty lists": lambda path: path.write_bytes(b'{"traceEvents":[' + b"[]," * 8_000_000 + b"[]]}"),
    "empty events": lambda path: path.write_bytes(b"[" + b"{}," * 8_000_000 + b"{}]"),
    "bomb of zeros": lambda path: _bomb(path, b"\0"),
    "bomb of spaces": lambda path: _bomb(path, b" "),
    "bomb of brackets": lambda path: _bomb(path, b"["),
    "bomb of objects": lambda path: _bomb(path, b"{},", b'{"traceEvents":['),
    "bomb of lists": lambda path: _bomb(path, b"[],", b"["),
    "bomb of events": lambda path: _bomb(path, _EVENT, b'{"traceEvents":['),
    "bomb of lines": lambda path: _bomb(path, b'"1","2"\n', b'"ID","Kernel Name"\n'),
    "bomb of a pickle": lambda path: _bomb(path, b"]", b"\x80\x04"),
}
