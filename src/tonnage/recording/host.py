"""Host memory of a run: its peak overall and in each phase, by purpose.

| part            | contents                                                                        |
|-----------------|---------------------------------------------------------------------------------|
| a `Category`    | CPU tensors of 1 MiB or more, counted in full                                   |
| `checkpoint`    | such tensors from `torch.load` that no module has taken over                    |
| `pinned`        | page-locked blocks, rounded up and kept as PyTorch's host allocator does        |
| `python`        | the interpreter's objects, those of libraries, and small tensors                |
| `libraries`     | resident code of the process                                                    |
| `cuda`          | host memory of CUDA's context and libraries with a real card                    |
| `workers`       | private memory of data loader workers and other child processes                 |
| `shared_memory` | segments of /dev/shm, through which workers pass batches                        |
| `rounding`      | what torch's CPU allocator takes in addition (on ARM, whole huge pages)         |
| `mapped_files`  | pages of mapped files that were read; the host may drop and reread them         |
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tonnage.recording.layout import record_of

CHECKPOINT, PINNED, PYTHON, LIBRARIES, CUDA, WORKERS, SHARED, ROUNDING, MAPPED = (
    "checkpoint", "pinned", "python", "libraries", "cuda", "workers", "shared_memory", "rounding", "mapped_files",
)  # fmt: skip
LARGEST = 8
HOST_KEY = "host"  # key in the header's table
_MOST_ROWS = 1000


@dataclass(frozen=True, slots=True)
class HostGroup:
    """Tensors of one part that were allocated at one line."""

    part: str
    line: str
    operator: str
    count: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMoment:
    """The peak of a phase: where it was, and what was held."""

    phase: str
    step: int = 0
    line: str = ""
    stack: tuple[str, ...] = ()
    parts: Mapping[str, int] = field(default_factory=dict)
    largest: tuple[HostGroup, ...] = ()

    @property
    def needed_bytes(self) -> int:
        """Bytes that the host must have: all but pages of files, which it may drop."""
        return sum(size for part, size in self.parts.items() if part != MAPPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPeaks:
    """The peaks of a run. `resident_peak_bytes` includes pages of files, and may occur at another moment."""

    phases: tuple[HostMoment, ...]
    mapped_peak_bytes: int = 0
    mapped_file_bytes: int = 0  # total size of the files mapped at that moment
    resident_peak_bytes: int = 0
    machine_bytes: int = 0  # memory of the machine that ran this

    @property
    def peak(self) -> HostMoment:
        """The moment with the highest need."""
        return max(self.phases, key=lambda moment: moment.needed_bytes)

    @property
    def needed_bytes(self) -> int:
        """The most bytes that the host must have."""
        return self.peak.needed_bytes


def groups_of(rows: Iterable[tuple[str, str, str, int]]) -> tuple[HostGroup, ...]:
    """Return the largest groups of (part, line, operator, bytes)."""
    sums: dict[tuple[str, str, str], list[int]] = {}
    for part, line, operator, size in rows:
        sums.setdefault((part, line, operator), []).append(size)
    groups = [HostGroup(*key, len(sizes), sum(sizes)) for key, sizes in sums.items()]
    return tuple(sorted(groups, key=lambda group: -group.size_bytes)[:LARGEST])


def host_memory(values: Any) -> HostPeaks:
    """Validate and convert what a file says."""

    def each(rows: list[Any], record: type[Any], what: str, **parts: Callable[[Any], Any]) -> tuple[Any, ...]:
        if len(rows) > _MOST_ROWS:
            raise ValueError(f"its host's memory has a list of {len(rows)} rows")
        return tuple(record_of(record, row, what, **parts) for row in rows)

    def phases(rows: list[Any]) -> tuple[HostMoment, ...]:
        largest = partial(each, record=HostGroup, what="tensors of the host")
        return each(rows, HostMoment, "moment of the host's memory", largest=largest)

    peaks = record_of(HostPeaks, values, "host's memory", phases=phases)
    if not peaks.phases:
        raise ValueError("its host's memory has no phase")
    return peaks
