"""Nsight Compute's CSV: bytes, operations and durations of kernels, as the hardware counted them.

| page           | made by                                  | looks like                               |
|----------------|------------------------------------------|------------------------------------------|
| raw (wide)     | `ncu --page raw --csv`                   | a line a kernel, a column a counter      |
| details (long) | `ncu --csv`, `ncu --metrics ... --csv`   | a line a counter, a name, a unit, a value|

Output of ncu or the program before the table is skipped. Missing counters become None. The meaning of the counters is data
(`data/ncu.toml`).
"""

import csv
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from math import isfinite, prod
from pathlib import Path
from typing import Any

from tonnage.clock.operators import Work
from tonnage.errors import BadProfile
from tonnage.roofline.items import Item, RooflineProfile, gathered, short_kernel_name

_DATA = Path(__file__).parents[1] / "data" / "ncu.toml"
_KERNEL = "Kernel Name"
_EXTENT = re.compile(r"\b\d{1,10}\b")
_HINT = "Make one with `ncu --page raw --csv --log-file FILE PROGRAM`."
_NO_DURATION = "It needs gpu__time_duration: `ncu --page raw --csv --section SpeedOfLight_RooflineChart PROGRAM`."


@dataclass(frozen=True, slots=True)
class NcuKernel:
    """One kernel: its counters by name, in seconds, bytes, shares or plain counts."""

    kernel: str
    grid: str
    block: str
    values: dict[str, float]
    device: str = ""

    def first(self, what: str) -> float | None:
        """Return the first counter of a kind that the file holds."""
        return next((self.values[name] for name in _names()[what] if name in self.values), None)


def read_ncu(lines: Iterable[str], source: str) -> RooflineProfile:
    """Return every kernel of a file, merging equal launches."""
    try:
        rows = csv.reader(lines, strict=False)
        heading = next((row for row in rows if _KERNEL in row and row[0].lstrip("\ufeff") == "ID"), None)
        if heading is None:
            raise BadProfile(f"{source} has no table of kernels.", hint=_HINT)
        pairs = (dict(zip(heading, row, strict=False)) for row in rows if len(row) == len(heading))
        found = _long(pairs) if "Metric Name" in heading else _wide(pairs)
        launches = [launch for launch in found if launch.first("duration")]
    except csv.Error as error:
        raise BadProfile(f"{source} is not CSV: {error}.", hint=_HINT) from None
    if not launches:
        raise BadProfile(f"{source} has no kernel with a duration.", hint=_NO_DURATION)
    items = gathered(map(_item, launches))
    device = next((launch.device for launch in launches if launch.device), "")
    return RooflineProfile(kind="nsight-compute", source=source, gpu=device, items=items, notes=tuple(_notes(items)))


def is_ncu(start: str) -> bool:
    """Say whether a text begins with ncu's own output or the table's heading."""
    return start.lstrip("\ufeff").startswith("==") or _KERNEL in start


def _notes(items: tuple[Item, ...]) -> Iterator[str]:
    if all(item.work.operations is None for item in items):
        yield (
            "The file counts no operations: how busy the SMs' pipes were stands for arithmetic. "
            "`ncu --set roofline` counts them."
        )
    if all(item.work.moved_bytes is None for item in items):
        yield "The file counts no bytes of DRAM: its share of the peak is Nsight Compute's own."


def _wide(rows: Iterator[dict[str, str]]) -> Iterator[NcuKernel]:
    """Read the wide form, whose line after the heading holds units; old files have no such line."""
    units = next(rows, {})
    first = [units] if units.get(_KERNEL) else []
    for row in chain(first, rows):
        numbers = {
            name: _number(row[name], "" if row is units else units.get(name, "")) for name in row if "__" in name
        }
        values = {name: number for name, number in numbers.items() if number is not None}
        yield _kernel(row, values, next((row[name] for name in _names()["device"] if name in row), ""))


def _kernel(row: dict[str, str], values: dict[str, float], device: str) -> NcuKernel:
    return NcuKernel(row[_KERNEL], row.get("Grid Size", ""), row.get("Block Size", ""), values, device)


def _long(rows: Iterator[dict[str, str]]) -> Iterable[NcuKernel]:
    found: dict[tuple[str, str], NcuKernel] = {}
    for row in rows:
        key = (row.get("Process ID", ""), row["ID"])
        launch = found.setdefault(key, _kernel(row, {}, row.get("Device Name", "")))
        name, unit = row["Metric Name"], row.get("Metric Unit", "")
        number = _number(row.get("Metric Value", ""), unit)
        # One label has two meanings: a share of the pipes' peak, and DRAM bytes per second.
        if name == "Memory Throughput" and unit != "%":
            name = "dram__bytes.sum.per_second"
        if number is not None:
            launch.values[name] = number
    return found.values()


def _item(launch: NcuKernel) -> Item:
    seconds = launch.first("duration")
    assert seconds is not None
    operations: dict[str, float] = {}
    for precision, counters in _names()["operations"].items():
        counts = [(_count(launch, stem, seconds), each) for stem, each in counters.items()]
        if any(count is not None for count, _ in counts):
            operations[precision] = sum((count or 0.0) * each for count, each in counts)
    moved_bytes, rate = launch.first("dram_bytes"), launch.first("dram_rate")
    parts = (launch.first("dram_read"), launch.first("dram_write"))
    if moved_bytes is None and None not in parts:
        moved_bytes = sum(part or 0.0 for part in parts)
    elif moved_bytes is None and rate is not None:
        moved_bytes = rate * seconds
    work = Work(None, moved_bytes)
    if operations:
        precision = max(operations, key=operations.__getitem__)
        work = Work(operations[precision], work.moved_bytes, precision)
    extents = [int(extent) for extent in _EXTENT.findall(launch.grid)]
    return Item(
        name=short_kernel_name(launch.kernel),
        detail=f"{_bare(launch.grid)} blocks of {_bare(launch.block)}" if launch.grid else "",
        seconds=seconds,
        work=work,
        dram_share=launch.first("dram_share"),
        sm_share=launch.first("sm_share"),
        on_chip_share=launch.first("on_chip_share"),
        blocks=prod(extents) if extents else None,
        kernels=(launch.kernel,),
        unknown="no DRAM bytes and no share of an SM's pipes in the file",
    )


def _number(text: str, unit: str) -> float | None:
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value * float(_names()["units"].get(unit, 1.0)) if isfinite(value) and value >= 0 else None


def _count(launch: NcuKernel, stem: str, seconds: float) -> float | None:
    cycles = launch.first("cycles")
    for unit in ("smsp__", "sm__"):
        values = launch.values
        if (total := values.get(f"{unit}{stem}.sum")) is not None:
            return total
        if (a_second := values.get(f"{unit}{stem}.sum.per_second")) is not None:
            return a_second * seconds
        if (a_cycle := values.get(f"{unit}{stem}.sum.per_cycle_elapsed")) is not None and cycles is not None:
            return a_cycle * cycles
    return None


def _bare(size: str) -> str:
    """Shorten "(262144, 1, 1)" to "262144"."""
    extents = _EXTENT.findall(size)
    while len(extents) > 1 and extents[-1] == "1":
        extents.pop()
    return "×".join(extents)


@cache
def _names() -> dict[str, Any]:
    return tomllib.loads(_DATA.read_text("utf-8"))
