"""Reads the data of a pickle without executing anything.

It interprets the opcodes of plain data (protocols 2 to 5) and refuses all others by name and offset: those that
import, call, build an object or ask the caller for one. The result consists of None, bool, int, float, str, bytes,
lists (also for tuples and sets) and `SharedKeysDict`s (for dicts). Nested values are never hashed, compared or printed, so
deep nesting does not use the call stack.

Every opcode either creates an object, which counts against `SnapshotLimits.object_bytes`, or has its own limit; so both
memory and work are bounded.
"""

import pickletools
import struct
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from tonnage.errors import BadSnapshot
from tonnage.recording.snapshot.stream import SnapshotLimits, Stream
from tonnage.units import MIB, format_bytes

Value = Any  # None | bool | int | float | str | bytes | list[Value] | Table

_WINDOW_BYTES = 1 << 20
_LONGEST_ARGUMENT_BYTES = 512  # excluding strings; a run of references counts as one
_OLDEST, _NEWEST = 2, 5

# Memory of objects, rounded up: a container, a slot in one, an integer or float, a string without its characters.
_CONTAINER_BYTES, _SLOT_BYTES, _NUMBER_BYTES, _STRING_BYTES = 104, 9, 32, 72
# Small files may be arbitrarily dense.
_GRACE_BYTES = 64 * MIB
# Picklers write lists in batches of a thousand: a shorter one is complete.
_BATCH = 1000

_PROTO, _STOP, _MARK, _MEMOIZE = 0x80, ord("."), ord("("), 0x94
_BINGET, _LONG_BINGET, _BININT1, _LONG1 = ord("h"), ord("j"), ord("K"), 0x8A

_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
_LONGEST_RUN = 64
_INDEX = struct.Struct("<I")
_ARGUMENTS = [struct.Struct("<" + "xI" * count) for count in range(_LONGEST_RUN + 1)]


class SharedKeysDict:
    """A dict as two sequences. Dicts of one shape share their keys, which saves memory for millions of them."""

    __slots__ = ("keys", "values")

    def __init__(self) -> None:
        self.keys: tuple[str, ...] | list[str] = ()
        self.values: list[Value] = []


def load(stream: Stream, limits: SnapshotLimits) -> Value:
    """Return the data of a pickle; raise BadSnapshot if it is not plain data, damaged, or too large."""
    machine = _Machine(stream, limits)
    try:
        return machine.run()
    finally:
        machine.forget()


class _Machine:
    """A stack with marks, and the memo. Handlers take the position of their argument and return its end."""

    def __init__(self, stream: Stream, limits: SnapshotLimits) -> None:
        self._stream, self._limits = stream, limits
        self._stack: list[Value] = []
        self._marks: list[int] = []
        self._memo: list[Value] = []
        self._strings: dict[bytes, str] = {}
        self._shapes: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._lists: dict[bytes, list[Value]] = {}
        self._buffer = b""
        self._before_buffer_bytes = 0
        self._ended = False
        self._object_bytes = 0
        self._frames = 0
        self._handlers: list[Callable[[int], int]] = [self._refused] * 256
        u1, u2, u4, u8, i4, f8 = map(struct.Struct, ("<B", "<H", "<I", "<Q", "<i", ">d"))
        number, text, raw = partial(partial, self._number), partial(partial, self._text), partial(partial, self._raw)
        known: dict[str | int, Callable[[int], int]] = {
            "N": partial(self._constant, None), 0x88: partial(self._constant, True), 0x89: partial(self._constant, False),
            "J": number(i4), "M": number(u2), "G": number(f8), 0x8B: self._long4,
            0x8C: text(u1), "X": text(u4), 0x8D: text(u8), "U": text(u1), "T": text(i4),
            "C": raw(u1), "B": raw(u4), 0x8E: raw(u8), 0x96: raw(u8),
            "}": lambda pos: self._begin(SharedKeysDict(), pos), "s": self._set_item, "u": self._set_items,
            "d": self._marked_table, **dict.fromkeys(("]", ")", 0x8F), lambda pos: self._begin([], pos)), "l": self._marked_list,
            "t": self._marked_list, 0x91: self._marked_list, "a": self._append, "e": self._appends, 0x90: self._appends,
            0x85: partial(self._tuple, 1), 0x86: partial(self._tuple, 2), 0x87: partial(self._tuple, 3),
            "q": partial(self._put, u1), "r": partial(self._put, u4), 0x95: self._frame,
        }  # fmt: skip
        for code, handler in known.items():
            self._handlers[code if isinstance(code, int) else ord(code)] = handler

    def run(self) -> Value:
        """Interpret the pickle to its end."""
        self._refill(0)
        if not self._buffer:
            raise BadSnapshot("The file is empty.")
        if self._buffer[0] != _PROTO or len(self._buffer) < 2:
            raise BadSnapshot(f"It is {_looks_like(self._buffer)}, not a pickle of protocol {_OLDEST} to {_NEWEST}.")
        if not _OLDEST <= self._buffer[1] <= _NEWEST:
            raise BadSnapshot(
                f"It is a pickle of protocol {self._buffer[1]}; those of {_OLDEST} to {_NEWEST} are read."
            )
        reached = self._run_window(2)
        while reached >= 0:
            reached = self._run_window(self._refill(reached))
        if len(self._stack) != 1 or self._marks:
            raise BadSnapshot(
                f"It stops with {len(self._stack)} values and {len(self._marks)} marks; one value is due."
            )
        return self._stack[0]

    def forget(self) -> None:
        """Drop all but the result, because handlers and machine refer to each other."""
        for held in (self._stack, self._memo, self._handlers, self._strings, self._shapes, self._lists):
            held.clear()
        self._buffer = b""

    def _refill(self, pos: int) -> int:
        # Once per window is enough: within one, a byte creates at most one object.
        limits = self._limits
        held_bytes = self._object_bytes + _SLOT_BYTES * (len(self._stack) + len(self._memo))
        read_bytes = self._before_buffer_bytes + len(self._buffer)
        most_bytes = min(limits.object_bytes, _GRACE_BYTES + limits.objects_per_byte * read_bytes)
        if held_bytes > most_bytes:
            raise BadSnapshot(
                f"Its first {format_bytes(read_bytes)} take more than {format_bytes(most_bytes)} of memory."
            )
        checks = (
            ("values waiting", len(self._stack), limits.stack_items),
            ("memo entries", len(self._memo), limits.memo_entries),
            ("frames", self._frames, limits.frames),
            ("nested marks", len(self._marks), limits.nested_marks),
        )
        for what, count, limit in checks:
            if count > limit:
                raise BadSnapshot(f"It has more than {limit:,} {what}.")
        more = self._stream.read(_WINDOW_BYTES)
        if pos and not more and pos >= len(self._buffer):
            raise BadSnapshot(f"It ends in the middle, at offset {self._before_buffer_bytes + pos}.")
        self._ended = len(more) < _WINDOW_BYTES
        self._before_buffer_bytes += pos
        self._buffer = self._buffer[pos:] + more
        return 0

    def _run_window(self, pos: int) -> int:
        """Interpret until little is left in the buffer; return the position, or -1 at the pickle's end."""
        buffer, stack, marks, memo, handlers = self._buffer, self._stack, self._marks, self._memo, self._handlers
        push, remember, unpack_index, integer = stack.append, memo.append, _INDEX.unpack_from, int.from_bytes
        numbers, most = 0, self._limits.integer_bytes + 2
        longest = self._limits.string_bytes + _LONGEST_ARGUMENT_BYTES
        stop = len(buffer) if self._ended else len(buffer) - longest
        try:
            while pos < stop:
                code = buffer[pos]
                if code == _BINGET:
                    if buffer[pos + 2] == _BINGET == buffer[pos + 4] == buffer[pos + 6]:
                        pos = self._gets(pos, 2)
                        continue
                    push(memo[buffer[pos + 1]])
                    pos += 2
                elif code == _LONG_BINGET:
                    if buffer[pos + 5] == _LONG_BINGET == buffer[pos + 10] == buffer[pos + 15] == buffer[pos + 20]:
                        pos = self._gets(pos, 5)
                        continue
                    push(memo[unpack_index(buffer, pos + 1)[0]])
                    pos += 5
                elif code == _LONG1:
                    end = pos + 2 + buffer[pos + 1]
                    if end > pos + most:
                        self._bad(f"is an integer of {end - pos - 2} bytes; {most - 2} are read", pos)
                    push(integer(buffer[pos + 2 : end], "little", signed=True))
                    numbers += 1
                    pos = end
                elif code == _BININT1:
                    push(buffer[pos + 1])
                    pos += 2
                elif code == _MEMOIZE:
                    remember(stack[-1])
                    pos += 1
                elif code == _MARK:
                    marks.append(len(stack))
                    pos += 1
                elif code == _STOP:
                    return -1
                else:
                    pos = handlers[code](pos + 1)
        except (IndexError, struct.error):
            self._bad("lacks what it works on", pos)
        finally:
            self._object_bytes += _NUMBER_BYTES * numbers
        return pos

    # Limits and refusals

    def _bad(self, problem: str, position: int) -> NoReturn:
        code = self._buffer[position] if position < len(self._buffer) else _STOP
        name = _NAMES.get(code) or f"Byte 0x{code:02x}"
        raise BadSnapshot(f"{name} at offset {self._before_buffer_bytes + position} {problem}.")

    def _refused(self, pos: int) -> int:
        known = self._buffer[pos - 1] in _NAMES
        self._bad("is not data: it is refused and nothing was run" if known else "is no opcode", pos - 1)

    def _constant(self, value: Value, pos: int) -> int:
        self._stack.append(value)
        return pos

    def _number(self, packed: struct.Struct, pos: int) -> int:
        self._stack.append(packed.unpack_from(self._buffer, pos)[0])
        self._object_bytes += _NUMBER_BYTES
        return pos + packed.size

    def _long4(self, pos: int) -> int:
        length: int = _INDEX.unpack_from(self._buffer, pos)[0]
        if length > self._limits.integer_bytes:
            self._bad(f"is an integer of {length} bytes; {self._limits.integer_bytes} are read", pos - 1)
        end = pos + 4 + length
        self._stack.append(int.from_bytes(self._buffer[pos + 4 : end], "little", signed=True))
        self._object_bytes += _NUMBER_BYTES
        return end

    def _text(self, packed: struct.Struct, pos: int) -> int:
        pos, end = self._span(packed, pos)
        data = self._buffer[pos:end]
        text = self._strings.get(data)
        if text is None:
            text = self._strings[data] = data.decode("utf-8", "replace")
            self._object_bytes += 2 * _STRING_BYTES + 5 * len(data)
        self._stack.append(text)
        return end

    def _raw(self, packed: struct.Struct, pos: int) -> int:
        pos, end = self._span(packed, pos)
        self._stack.append(self._buffer[pos:end])
        self._object_bytes += _STRING_BYTES + end - pos
        return end

    def _span(self, packed: struct.Struct, pos: int) -> tuple[int, int]:
        """Return the start and end of a string whose length is stored at a position."""
        (length,) = packed.unpack_from(self._buffer, pos)
        if not 0 <= length <= self._limits.string_bytes:
            self._bad(f"is {length} bytes long; {self._limits.string_bytes} are read", pos - 1)
        end = pos + packed.size + length
        if end > len(self._buffer):
            self._bad("is cut off by the end of the file", pos - 1)
        return pos + packed.size, end

    def _begin(self, container: Value, pos: int) -> int:
        """Push a container, and handle the usual next opcodes at once: memoize it, and set a mark."""
        stack, buffer = self._stack, self._buffer
        stack.append(container)
        self._object_bytes += _CONTAINER_BYTES
        if buffer[pos] == _MEMOIZE:
            self._memo.append(container)
            pos += 1
            if buffer[pos] == _MARK:
                self._marks.append(len(stack))
                pos += 1
        return pos

    def _marked_list(self, pos: int) -> int:
        items = self._since_mark()
        self._object_bytes += _CONTAINER_BYTES + _SLOT_BYTES * len(items)
        self._stack.append(items)
        return pos

    def _tuple(self, length: int, pos: int) -> int:
        stack = self._stack
        if len(stack) < length:
            raise IndexError
        items = stack[-length:]
        del stack[-length:]
        stack.append(items)
        self._object_bytes += _CONTAINER_BYTES
        return pos

    def _append(self, pos: int) -> int:
        self._extend([self._stack.pop()], pos)
        return pos

    def _appends(self, pos: int) -> int:
        items = self._since_mark()
        if not items:
            self._bad("adds nothing", pos - 1)
        if not self._is_known(items):
            self._extend(items, pos)
        return pos

    def _is_known(self, items: list[Value]) -> bool:
        """Replace a new list by an existing one with the same items: stacks repeat with every step."""
        stack, memo = self._stack, self._memo
        new = stack[-1]
        if type(new) is not list or new or not memo or memo[-1] is not new or len(items) >= _BATCH:
            return False
        first = self._lists.setdefault(array("Q", map(id, items)).tobytes(), new)
        if first is new:
            self._object_bytes += _CONTAINER_BYTES + _SLOT_BYTES * len(items)
            return False
        stack[-1] = memo[-1] = first
        self._object_bytes -= _CONTAINER_BYTES
        return True

    def _extend(self, items: list[Value], pos: int) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            self._bad(f"adds to {kind(target)}", pos - 1)
        target.extend(items)
        self._object_bytes += _SLOT_BYTES * len(items)

    def _since_mark(self) -> list[Value]:
        mark = self._marks.pop()
        items = self._stack[mark:]
        del self._stack[mark:]
        return items

    def _marked_table(self, pos: int) -> int:
        items = self._since_mark()
        self._stack.append(SharedKeysDict())
        self._object_bytes += _CONTAINER_BYTES
        if items:
            self._fill(items, pos)
        return pos

    def _set_item(self, pos: int) -> int:
        value, key = self._stack.pop(), self._stack.pop()
        self._fill([key, value], pos)
        return pos

    def _set_items(self, pos: int) -> int:
        items = self._since_mark()
        if not items:
            self._bad("sets nothing", pos - 1)
        self._fill(items, pos)
        return pos

    def _fill(self, items: list[Value], pos: int) -> None:
        table = self._stack[-1]
        if type(table) is not SharedKeysDict:
            self._bad(f"sets a key of {kind(table)}", pos - 1)
        keys = tuple(items[::2])
        if len(items) % 2 or len(table.keys) + len(keys) > self._limits.dict_keys:
            self._bad("has a key without a value, or too many of them", pos - 1)
        if not table.keys:
            table.keys = self._shape(keys, pos)
            table.values = items[1::2]
        else:
            if isinstance(table.keys, tuple):
                table.keys = list(table.keys)
            table.keys.extend(self._shape(keys, pos))
            table.values.extend(items[1::2])
        self._object_bytes += 2 * _SLOT_BYTES * len(keys)

    def _shape(self, keys: tuple[Value, ...], pos: int) -> tuple[str, ...]:
        """Return these keys as a tuple shared by all dicts with them."""
        try:
            shape = self._shapes.get(keys)
        except TypeError:  # lists and tables are not hashable
            self._bad("has a key that is not a string", pos - 1)
        if shape is None:
            if not all(type(key) is str for key in keys):
                self._bad("has a key that is not a string", pos - 1)
            if len(self._shapes) >= self._limits.dict_shapes:
                self._bad(f"has keys unlike the {self._limits.dict_shapes:,} kinds of dict before it", pos - 1)
            shape = self._shapes[keys] = keys
        return shape

    def _gets(self, pos: int, width: int) -> int:
        """Handle a run of BINGET or LONG_BINGET at once: most of a snapshot is stacks of known frames."""
        codes = self._buffer[pos : pos + width * _LONGEST_RUN : width]
        count = len(codes) - len(codes.lstrip(codes[:1]))
        end = pos + width * count
        if end > len(self._buffer):
            raise IndexError
        # Each opcode is followed by its argument: one byte, or four.
        run = self._buffer[pos:end]
        indices = run[1::2] if width == 2 else _ARGUMENTS[count].unpack(run)
        self._stack.extend(map(self._memo.__getitem__, indices))
        return end

    def _put(self, packed: struct.Struct, pos: int) -> int:
        (index,) = packed.unpack_from(self._buffer, pos)
        if index != len(self._memo):
            self._bad(f"puts entry {index} of the memo where {len(self._memo)} is next", pos - 1)
        self._memo.append(self._stack[-1])
        return pos + packed.size

    def _frame(self, pos: int) -> int:
        """Skip the frame's length; the contents follow anyway."""
        self._frames += 1
        return pos + 8


def kind(value: Value) -> str:
    """Return a value's type in words."""
    names = {type(None): "nothing", SharedKeysDict: "a dict", list: "a list", str: "a string", int: "an integer"}
    return names.get(type(value), f"a {type(value).__name__}")


def _looks_like(data: bytes) -> str:
    if data.startswith(b"PK\x03\x04"):
        return "a zip, as torch.save writes"
    if data.startswith(b"SQLite format 3\0"):
        return "a database"
    start = data[:64]
    return "text" if start.isascii() and start.decode().replace("\n", "").isprintable() else "unknown data"
