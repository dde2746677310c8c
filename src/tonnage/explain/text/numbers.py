"""The numbers in PyTorch's out-of-memory messages, in every wording since 1.0, and in those of HIP, XPU, MPS and NPU.

| wording | what is special |
|---|---|
| 1.0 to 1.3 | "cached" is what is reserved and not allocated |
| 1.4 to 2.0 | "reserved in total by PyTorch" includes what is allocated; 1.8 and newer may have "allowed" |
| 2.1 and newer | other processes are listed; this one is named unless NVML numbers processes differently, as in a container |
| cudaMallocAsync | "Currently allocated", "Device limit"; its "PyTorch limit" is 2^64 if not set |
| MPS | units are binary, whatever they are called; "max allowed" is Apple's share for the GPU |

Sizes are printed with two decimals: values computed from them are accurate to within their `slack`.
"""

import re
from dataclasses import dataclass, field, replace
from typing import Any

from tonnage.errors import RequestError
from tonnage.units import GIB, KIB, MIB, TIB

_PREFIXES = {"k": KIB, "m": MIB, "g": GIB, "t": TIB}
_UNITS = {"bytes": 1, "b": 1} | {prefix + unit: size for prefix, size in _PREFIXES.items() for unit in ("ib", "b")}
_SIZE = r"(-?[0-9]{1,40}(?:\.[0-9]{1,9})?) ?(bytes|B|[KMGT]i?B)\b"
_MESSAGE = re.compile(r"Tried to allocate|would exceed allowed memory|MPS backend out of memory \(")
_LONGEST_MESSAGE = 3000
# No device has more: the counter was never set or has underflowed.
_MOST_BYTES = 1024 * TIB
# What a listed process may hold beside PyTorch's memory and still be this one: context, libraries, NCCL.
_MOST_OUTSIDE_BYTES = 4 * GIB
_LABELS = {
    "asked": rf"Tried to allocate {_SIZE}|Requested ?: {_SIZE}",
    "total": rf"{_SIZE} total capacity|total capac(?:i)?ty of {_SIZE}|Device limit ?: {_SIZE}",
    "free": rf"{_SIZE} free[;.]|of which {_SIZE} is free|Free \(according to CUDA\) ?: {_SIZE}",
    "allocated": rf"{_SIZE} already allocated|{_SIZE} is allocated by PyTorch|Currently allocated ?: {_SIZE}"
    rf"|MPS allocated: {_SIZE}",
    "reserved": rf"{_SIZE} reserved in total by PyTorch",
    "unallocated": rf"{_SIZE} cached\)|{_SIZE} is reserved by PyTorch but unallocated",
    "allowed": rf"{_SIZE} allowed;|memory fraction\) ?: {_SIZE}|max allowed: {_SIZE}",
    "process": rf"this process has {_SIZE} memory in use",
    "private": rf"with {_SIZE} allocated in private pools",
    "elsewhere": rf"other allocations: {_SIZE}",
}
_PATTERNS = {name: re.compile(pattern) for name, pattern in _LABELS.items()}
_OTHER = re.compile(rf"Process \d+ has {_SIZE} memory in use")
_DEVICE = re.compile(r"(?:\((?:GPU|NPU|MLU) |GPU |device )(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageNumbers:
    """What one message says, in bytes; None for what it does not say."""

    wording: str
    asked: int
    roundings: dict[str, int] = field(default_factory=dict)
    device: int | None = None
    total: int | None = None
    free: int | None = None
    allocated: int | None = None
    unallocated: int | None = None
    allowed: int | None = None
    process: int | None = None
    private: int | None = None
    elsewhere: int | None = None
    others: tuple[int, ...] = field(default=())
    is_process_inferred: bool = False

    def slack(self, *names: str) -> int:
        """Return the error of a sum of these sizes: half of the last digit of each."""
        return sum(self.roundings.get(name, 0) for name in names)

    @property
    def reserved(self) -> int | None:
        """What PyTorch's allocator holds."""
        return None if self.allocated is None or self.unallocated is None else self.allocated + self.unallocated

    @property
    def own(self) -> int | None:
        """What this process is known to hold."""
        return next((size for size in (self.process, self.reserved, self.allocated) if size is not None), None)

    @property
    def short(self) -> int | None:
        """How much more would have had to be free."""
        return None if self.free is None else max(0, self.asked - self.free)

    @property
    def unexplained(self) -> int | None:
        """What is neither free nor this process's."""
        if self.total is None or self.free is None or self.own is None:
            return None
        return max(0, self.total - self.free - self.own)


def read_numbers(text: str) -> MessageNumbers | None:
    """Return the numbers of the first message in a text with single spaces, if any; reject what no device can report."""
    start = _MESSAGE.search(text)
    if start is None:
        return None
    # MPS and cudaMallocAsync print the request last.
    end = text.find("Tried to allocate", start.end() + 200)
    message = text[max(0, start.start() - 40) : min(start.start() + _LONGEST_MESSAGE, end if end > 0 else len(text))]
    found = {name: _size(pattern.search(message)) for name, pattern in _PATTERNS.items()}
    if found["asked"] is None:
        return None
    others = [size for match in _OTHER.finditer(message) if (size := _size(match)) is not None]
    numbers = {name: size[0] for name, size in found.items() if size is not None}
    for name in ("allowed", "process"):  # never set, or underflow: NVML does not know this process
        if numbers.get(name, 0) > _MOST_BYTES:
            del numbers[name]
    # Reject what no device can report: more free than there is, or a device without memory. More may be allocated than
    # there is: Windows lends a card the host's memory.
    total, free = numbers.get("total"), numbers.get("free", 0)
    if max(numbers.values()) > _MOST_BYTES or (total is not None and (total < MIB or free > total + total // 100)):
        problem = "The numbers of the message make no sense: no device has so much, or more free than it has."
        raise RequestError(problem, hint="Paste the message as it was printed.")
    reserved = numbers.pop("reserved", None)
    if reserved is not None and "allocated" in numbers:
        numbers.setdefault("unallocated", max(0, reserved - numbers["allocated"]))
    device = _DEVICE.search(message)
    roundings = {name: size[1] for name, size in found.items() if size is not None}
    roundings["others"] = sum(rounding for _, rounding in others)
    if "reserved" in roundings:  # unallocated was computed
        roundings["unallocated"] = roundings["reserved"] + roundings.get("allocated", 0)
    listed = [size for size, _ in others if size <= _MOST_BYTES]
    told: dict[str, Any] = {"wording": _wording(message, found), "roundings": roundings, "others": tuple(listed)}
    read = MessageNumbers(device=int(device[1][:4]) if device else None, **(told | numbers))
    # If the message does not name this process, it is the listed one that holds what PyTorch does.
    if read.process is None and read.reserved is not None:
        low = read.reserved - read.slack("allocated", "unallocated", "others")
        own = min((size for size in listed if low <= size <= read.reserved + _MOST_OUTSIDE_BYTES), default=None)
        if own is not None:
            listed.remove(own)
            return replace(read, process=own, others=tuple(listed), is_process_inferred=True)
    return read


def _size(match: re.Match[str] | None) -> tuple[int, int] | None:
    """Return the bytes of a matched size, and their error: half of the last digit."""
    if match is None:
        return None
    number, unit = [group for group in match.groups() if group is not None][:2]
    factor = _UNITS[unit.lower()]
    digits = len(number.partition(".")[2])
    value = float(number[:40]) * factor
    if value < 0:
        problem = f"The message says {number[:20]} {unit}: no size is below zero."
        raise RequestError(problem, hint="Paste the message as it was printed.")
    return int(min(value, 2.0**70)), 0 if factor == 1 else int(factor / 2 / 10**digits) + 1


def _wording(message: str, found: dict[str, tuple[int, int] | None]) -> str:
    if "MPS" in message[:120]:
        return "PyTorch on MPS"
    if found["total"] is None:
        return "PyTorch, cut short"
    if "Device limit" in message:
        return "PyTorch with cudaMallocAsync"
    if "cached)" in message:
        return "PyTorch 1.0 to 1.3"
    if found["reserved"] is not None or "already allocated" in message:
        return "PyTorch 1.4 to 2.0"
    return "PyTorch 2.1" if "capacty" in message else "PyTorch 2.1 or newer"
