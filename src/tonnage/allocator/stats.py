"""Counters of the allocator, as `torch.cuda.memory_stats()` reports them. Callers report changes.

They run for every tensor, so derivable values are not counted: `freed` is what was added since the last reset minus what
is left of it, "all" is the sum of both pools (except for peaks), and an active block is allocated or pending.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

STATISTICS = tuple(
    "allocation segment active inactive_split allocated_bytes reserved_bytes active_bytes inactive_split_bytes "
    "requested_bytes".split()
)


@dataclass(slots=True, eq=False)
class PoolCounters:
    """Each statistic as `x` (current), `x_peak` and `x_total` (all that was ever added)."""

    allocation: int = 0
    allocation_peak: int = 0
    allocation_total: int = 0
    segment: int = 0
    segment_peak: int = 0
    segment_total: int = 0
    active: int = 0
    active_peak: int = 0
    active_total: int = 0
    inactive_split: int = 0
    inactive_split_peak: int = 0
    inactive_split_total: int = 0
    allocated_bytes: int = 0
    allocated_bytes_peak: int = 0
    allocated_bytes_total: int = 0
    reserved_bytes: int = 0
    reserved_bytes_peak: int = 0
    reserved_bytes_total: int = 0
    active_bytes: int = 0
    active_bytes_peak: int = 0
    active_bytes_total: int = 0
    inactive_split_bytes: int = 0
    inactive_split_bytes_peak: int = 0
    inactive_split_bytes_total: int = 0
    requested_bytes: int = 0
    requested_bytes_peak: int = 0
    requested_bytes_total: int = 0
    pending: int = 0
    pending_bytes: int = 0
    _kept: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STATISTICS, 0))

    def update_active(self) -> None:
        """Update the derived statistics, before they are read or reset."""
        self.active = self.allocation + self.pending
        self.active_bytes = self.allocated_bytes + self.pending_bytes
        self.active_peak = max(self.active_peak, self.allocation_peak)
        self.active_bytes_peak = max(self.active_bytes_peak, self.allocated_bytes_peak)
        self.active_total, self.active_bytes_total = self.allocation_total, self.allocated_bytes_total

    def reset_peak(self) -> None:
        """Reset peaks to the current values."""
        for name in STATISTICS:
            setattr(self, name + "_peak", getattr(self, name))

    def reset_accumulated(self) -> None:
        """Reset totals to zero."""
        for name in STATISTICS:
            setattr(self, name + "_total", 0)
            self._kept[name] = getattr(self, name)

    def flat(self, pool: str) -> Iterator[tuple[str, int]]:
        """Yield the entries of `torch.cuda.memory_stats()` for "all", "small_pool" or "large_pool"."""
        for name in STATISTICS:
            now, total = getattr(self, name), getattr(self, name + "_total")
            yield f"{name}.{pool}.current", now
            yield f"{name}.{pool}.peak", getattr(self, name + "_peak")
            yield f"{name}.{pool}.allocated", total
            yield f"{name}.{pool}.freed", total - (now - self._kept[name])


class CountedPool(PoolCounters):
    """The counters of the small or the large pool; they also update the peaks of both together."""

    __slots__ = ("other", "whole")
    other: "CountedPool"

    def __init__(self, whole: PoolCounters) -> None:
        super().__init__()
        self.whole = whole

    def allocate(self, size_bytes: int, requested_bytes: int) -> None:
        """Count an allocated block."""
        other, whole = self.other, self.whole
        self.allocation_total += 1
        self.allocated_bytes_total += size_bytes
        self.requested_bytes_total += requested_bytes
        self.allocation = now = self.allocation + 1
        if now > self.allocation_peak:
            self.allocation_peak = now
        now += other.allocation
        if now > whole.allocation_peak:
            whole.allocation_peak = now
        self.allocated_bytes = now = self.allocated_bytes + size_bytes
        if now > self.allocated_bytes_peak:
            self.allocated_bytes_peak = now
        now += other.allocated_bytes
        if now > whole.allocated_bytes_peak:
            whole.allocated_bytes_peak = now
        self.requested_bytes = now = self.requested_bytes + requested_bytes
        if now > self.requested_bytes_peak:
            self.requested_bytes_peak = now
        now += other.requested_bytes
        if now > whole.requested_bytes_peak:
            whole.requested_bytes_peak = now
        if self.pending or other.pending:
            active, size = self.allocation + self.pending, self.allocated_bytes + self.pending_bytes
            self.active_peak = max(self.active_peak, active)
            self.active_bytes_peak = max(self.active_bytes_peak, size)
            whole.active_peak = max(whole.active_peak, active + other.allocation + other.pending)
            size += other.allocated_bytes + other.pending_bytes
            whole.active_bytes_peak = max(whole.active_bytes_peak, size)

    def split(self, blocks: int, size_bytes: int) -> None:
        """Change the count and bytes of free blocks in split segments."""
        self.inactive_split = now = self.inactive_split + blocks
        if blocks > 0:
            self.inactive_split_total += blocks
            if now > self.inactive_split_peak:
                self.inactive_split_peak = now
            now += self.other.inactive_split
            if now > self.whole.inactive_split_peak:
                self.whole.inactive_split_peak = now
        self.inactive_split_bytes = now = self.inactive_split_bytes + size_bytes
        if size_bytes > 0:
            self.inactive_split_bytes_total += size_bytes
            if now > self.inactive_split_bytes_peak:
                self.inactive_split_bytes_peak = now
            now += self.other.inactive_split_bytes
            if now > self.whole.inactive_split_bytes_peak:
                self.whole.inactive_split_bytes_peak = now

    def reserve(self, size_bytes: int, segments: int) -> None:
        """Count memory from the device; pages mapped into an expandable segment are not a new segment."""
        other, whole = self.other, self.whole
        self.segment += segments
        self.segment_total += segments
        self.segment_peak = max(self.segment_peak, self.segment)
        whole.segment_peak = max(whole.segment_peak, self.segment + other.segment)
        self.reserved_bytes += size_bytes
        self.reserved_bytes_total += size_bytes
        self.reserved_bytes_peak = max(self.reserved_bytes_peak, self.reserved_bytes)
        whole.reserved_bytes_peak = max(whole.reserved_bytes_peak, self.reserved_bytes + other.reserved_bytes)

    def unreserve(self, size_bytes: int, segments: int) -> None:
        """Count memory returned to the device."""
        self.segment -= segments
        self.reserved_bytes -= size_bytes


@dataclass(slots=True, eq=False)
class Gauge:
    """One number with its peak and its total."""

    current: int = 0
    peak: int = 0
    total: int = 0
    _kept: int = 0

    def add(self, amount: int) -> None:
        """Change by an amount of either sign."""
        self.current += amount
        self.peak = max(self.peak, self.current)
        self.total += max(amount, 0)

    def reset_peak(self) -> None:
        """Reset the peak to the current value."""
        self.peak = self.current

    def reset_accumulated(self) -> None:
        """Reset the total to zero."""
        self.total, self._kept = 0, self.current

    def flat(self, name: str) -> Iterator[tuple[str, int]]:
        """Yield the entries of `torch.cuda.memory_stats()` under this name."""
        yield f"{name}.current", self.current
        yield f"{name}.peak", self.peak
        yield f"{name}.allocated", self.total
        yield f"{name}.freed", self.total - (self.current - self._kept)


class AllocatorCounters:
    """All counters of one device."""

    def __init__(self) -> None:
        self._whole = PoolCounters()
        self.small, self.large = CountedPool(self._whole), CountedPool(self._whole)
        self.small.other, self.large.other = self.large, self.small
        self.oversize_allocations, self.oversize_segments = Gauge(), Gauge()
        self.alloc_retries = self.ooms = self.syncs = self.device_allocs = self.device_frees = 0

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the blocks that the program holds."""
        return self.small.allocated_bytes + self.large.allocated_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all segments."""
        return self.small.reserved_bytes + self.large.reserved_bytes

    @property
    def whole(self) -> PoolCounters:
        """The counters of both pools together."""
        self.small.update_active()
        self.large.update_active()
        self._whole.update_active()
        for name in STATISTICS:
            for key in (name, name + "_total"):
                setattr(self._whole, key, getattr(self.small, key) + getattr(self.large, key))
        return self._whole

    def reset_peak(self) -> None:
        """Reset every peak to its current value."""
        for each in (self.whole, self.small, self.large, self.oversize_allocations, self.oversize_segments):
            each.reset_peak()

    def reset_accumulated(self) -> None:
        """Reset every total to zero."""
        for each in (self.whole, self.small, self.large, self.oversize_allocations, self.oversize_segments):
            each.reset_accumulated()
        self.alloc_retries = self.ooms = self.syncs = self.device_allocs = self.device_frees = 0

    def flat(self) -> dict[str, int]:
        """Return the dictionary of `torch.cuda.memory_stats()` without "max_split_size"."""
        stats = dict(self.whole.flat("all"))
        stats |= dict(self.small.flat("small_pool")) | dict(self.large.flat("large_pool"))
        stats |= dict(self.oversize_allocations.flat("oversize_allocations"))
        stats |= dict(self.oversize_segments.flat("oversize_segments"))
        return stats | {
            "num_alloc_retries": self.alloc_retries,
            "num_ooms": self.ooms,
            "num_sync_all_streams": self.syncs,
            "num_device_alloc": self.device_allocs,
            "num_device_free": self.device_frees,
        }
