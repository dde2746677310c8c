"""Profile a training at each micro-batch size, in every mode in which its blocks can run.

Each kind of block is measured once per size: as it is, and with parts recomputed. The solver chooses among the
resulting modes. This module does not know budgets or which mode is best.
"""

from bisect import bisect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch
from torch import nn

from tonnage.fit.choose.frontier import frontier
from tonnage.fit.modules import draw_others, eagerly, find_blocks, undisturbed
from tonnage.fit.recomputing.operators import event_clock, profile_operators, virtual_clock
from tonnage.fit.stepping.batches import batch_rows, take_rows
from tonnage.fit.survey import measuring
from tonnage.fit.survey.meter import GpuMeter, card_of
from tonnage.fit.survey.profile import BlockProfile, OutsideProfile, mixed
from tonnage.fit.technique import NotApplicable
from tonnage.fit.techniques.recompute import Recompute, recomputable
from tonnage.fit.training import Batch, Training

KEEP, BLOCK, OFFLOAD, BLOCK_OFFLOAD = "keep", "block", "offload", "block+offload"
OPERATORS = "operators:"  # followed by the calls whose outputs stay: "operators:17:aten.mm.default,20:..."
_OPERATOR_LEVELS = 6
# Recomputing a part alone must free at least this share of what its block saves.
_AGAIN = 1e-3  # share of a block's time that recomputing a part of it takes at least
_WORTHWHILE = 0.1
_STALL_S_PER_BYTE = 1.5e-11  # measured: 23 GB each way took 0.34 s longer, 41 GB 0.85 s
_PARTS = ("mlp", "ffn", "feed_forward", "attn", "attention")

Ways = dict[str, dict[str, BlockProfile]]  # kind without its inputs → mode → profile


@dataclass(frozen=True)
class SizeProfile:
    """Profile of one micro-batch with this many rows."""

    rows: int
    kinds: dict[str, str]  # block → kind
    blocks: dict[str, dict[str, BlockProfile]]  # kind → "keep" or "part:mlp" → profile
    outside: OutsideProfile
    unrepeatable: frozenset[str] = frozenset()  # kinds that must not run twice

    def modes(self, *, offload: bool) -> list[list[BlockProfile]]:
        """Return the modes of each block, in order."""
        by_kind = {
            kind: _modes(ways, offload=offload, recompute=_stem(kind) not in self.unrepeatable)
            for kind, ways in self.blocks.items()
        }
        return [by_kind[kind] for kind in self.kinds.values()]

    @property
    def alone_bytes(self) -> int:
        """The bytes needed to measure the largest of its blocks, or the rest, alone."""
        blocks = (way.kept_bytes + way.forward_peak_bytes for ways in self.blocks.values() for way in ways.values())
        return max([self.outside.peak_bytes, self.outside.stem_peak_bytes, *blocks])

    def kept(self, block: str) -> BlockProfile:
        return self.blocks[self.kinds[block]][KEEP]


class Survey:
    """Measures a size when it is first requested. Techniques that always pay are already applied."""

    def __init__(self, training: Training, meter: GpuMeter) -> None:
        self.training, self.meter = training, meter
        self.blocks = find_blocks(training.model)
        self.rows = batch_rows(training.sample)
        self.sizes: dict[int, SizeProfile] = {}
        self._required: dict[str, measuring.Required] | None = None
        self.by_chance = False  # whether some passes skip blocks
        self._ways_at: dict[int, Ways] = {}  # by size
        self._eager_ways: set[tuple[int, str]] = set()  # sizes and modes of compiled blocks that were measured eagerly
        self.supposed: set[int] = set()  # sizes that are estimated, not measured
        self.outside: dict[int, OutsideProfile] = {}  # sizes at which the rest was measured, with or without blocks
        self.unrepeatable: dict[str, str] = {}  # kind without its inputs → why it must not run twice
        self.rehearsal_pace = 1.0  # a rehearsed block's share of its time in a real step, at the size measured last

    @property
    def measured(self) -> dict[int, SizeProfile]:
        return {rows: size for rows, size in sorted(self.sizes.items()) if rows not in self.supposed}

    def at(self, rows: int) -> SizeProfile:
        if rows not in self.sizes or rows in self.supposed:
            self.sizes[rows] = self._measure(rows)
            self.supposed.discard(rows)
        return self.sizes[rows]

    def _measure(self, rows: int) -> SizeProfile:
        training, meter = self.training, self.meter
        with self._calls_at(rows) as (batch, calls):
            self.blocks = {name: self.blocks[name] for name in calls.kinds}  # only those that run
            blocks = {kind: {KEEP: measuring.measure_block(meter, call)} for kind, (_, call) in calls.by_kind.items()}
            if calls.by_kind and not meter.virtual and training.ranks is None:
                kind, (_, call) = next(iter(calls.by_kind.items()))
                usual_s = blocks[kind][KEEP].forward_s + blocks[kind][KEEP].backward_s
                self.rehearsal_pace = measuring.rehearsal_pace(meter, call, usual_s)
            outside = measuring.measure_outside(training, meter, self.blocks, calls, batch)
        return self._with_ways(SizeProfile(rows, calls.kinds, blocks, outside, frozenset(self.unrepeatable)))

    @contextmanager
    def _calls_at(self, rows: int) -> Iterator[tuple[Batch, measuring.BlockCalls]]:
        """Yield a batch of this size and the calls of blocks with it. Random numbers advance.

        State that a model carries between batches is restored: it may not suit another size.
        """
        draw_others(self.training.device)
        with undisturbed(self.training.model, self.training.device):
            batch = take_rows(self.training.sample, slice(0, rows))
            yield batch, self._capture(batch)

    def _capture(self, batch: Batch) -> measuring.BlockCalls:
        if self._required is None:
            self._required = measuring.required_gradients(self.training, self.blocks, batch)
        calls = measuring.capture_calls(self.training, self.blocks, batch, self._required)
        self.by_chance |= calls.by_chance
        return calls

    def find_unrepeatable(self) -> None:
        """Find the blocks that must not run twice."""
        with self._calls_at(min(self.measured)) as (_, calls):
            reasons = recomputable(self.training, list(calls.kinds))
        self.unrepeatable = {_stem(calls.kinds[name]): reason for name, reason in reasons.items() if reason}
        kinds = frozenset(self.unrepeatable)
        self.sizes = {rows: replace(size, unrepeatable=kinds) for rows, size in self.sizes.items()}

    def detail(self, rows: int) -> None:
        """Also measure parts and operators of blocks at this size; other sizes scale them from the nearest one.

        Each recomputed part would compile its block again, so compiled blocks are measured eagerly here, if memory
        allows.
        """
        self._ways_at[rows] = {}  # stays empty if memory does not suffice
        if "compile" in self.training.applied:
            with suppress(torch.OutOfMemoryError), eagerly():
                self._ways_at[rows] = self._all_ways_at(rows)
            self._eager_ways |= {(rows, mode) for ways in self._ways_at[rows].values() for mode in ways}
        if not self._ways_at[rows]:
            self._ways_at[rows] = self._all_ways_at(rows)
        self.sizes = {size.rows: self._with_ways(size) for size in self.sizes.values()}

    def _all_ways_at(self, rows: int) -> Ways:
        found = {}
        with self._calls_at(rows) as (_, calls):
            for kind, (name, call) in calls.by_kind.items():
                block = self.blocks[name]
                children = [n for n, child in block.named_children() if any(True for _ in child.parameters())]
                parts = [n for n in children if any(part in n.lower() for part in _PARTS) and "norm" not in n]
                modes = [*(f"part:{n}" for n in parts), *self._operator_modes(block, call)]
                found[_stem(kind)] = self._measure_modes(name, call, modes)
        return found

    def eager_modes(self, rows: int, modes: Collection[str]) -> set[str]:
        """Return those modes that were measured eagerly at this size although blocks are compiled."""
        return {mode for mode in modes if mode != KEEP and (rows, mode) in self._eager_ways}

    def compile_modes(self, rows: int, modes: Collection[str]) -> None:
        """Measure these modes compiled, as they will run; other modes keep their share of the block."""
        self._eager_ways -= {(rows, mode) for mode in modes}
        before, self._ways_at[rows] = self._ways_at[rows], {}  # stays empty if memory does not suffice
        with self._calls_at(rows) as (_, calls):
            for kind, (name, call) in calls.by_kind.items():
                compiled = self._measure_modes(name, call, modes)
                rest = {mode: way for mode, way in before[_stem(kind)].items() if mode not in modes}
                self._ways_at[rows][_stem(kind)] = _all_ways(rest, compiled[KEEP]) | compiled
        self.sizes = {size.rows: self._with_ways(size) for size in self.sizes.values()}

    def charge(self, rows: int, modes: Sequence[str], delay_s: float) -> bool:
        """Add this delay of a micro-batch to the measured modes among those of its blocks; return whether there are any."""
        if not self._ways_at:
            return False
        nearest = self._nearest_detail(rows)
        kinds = [_stem(kind) for kind in self.sizes[rows].kinds.values()]
        ran = [(kind, mode) for kind, mode in zip(kinds, modes, strict=True) if mode != KEEP]
        charged = {pair for pair in ran if pair[1] in self._ways_at[nearest].get(pair[0], {})}
        blocks = sum(pair in charged for pair in ran)
        for kind, mode in charged:
            ways = self._ways_at[nearest][kind]
            ways[mode] = replace(ways[mode], backward_s=ways[mode].backward_s + delay_s / blocks * nearest / rows)
        self.sizes = {size.rows: self._with_ways(size) for size in self.sizes.values()}
        return bool(charged)

    def is_detailed(self, rows: int) -> bool:
        return rows in self._ways_at

    def measure_outside(self, candidates: Sequence[int], like: "Survey", room_bytes: int) -> None:
        """Measure everything outside the blocks at the largest size that fits.

        It is never compiled, so this is quick; and a chunked loss grows with the rows only up to two chunks.
        """
        while larger := [
            rows
            for rows in candidates
            if rows > max(self._known_outside(like)) and self._outside_at(rows, like).peak_bytes <= room_bytes
        ]:
            rows = max(larger)
            with self._calls_at(rows) as (batch, calls):
                self.outside[rows] = measuring.measure_outside(self.training, self.meter, self.blocks, calls, batch)
        self.outside = self._known_outside(like)

    def _known_outside(self, like: "Survey") -> dict[int, OutsideProfile]:
        """Return the measured profiles by size, including those that `like` measured before blocks were compiled."""
        known: dict[int, OutsideProfile] = {}
        for survey in (like, self):
            known |= survey.outside | {rows: size.outside for rows, size in survey.measured.items()}
        return known

    def _outside_at(self, rows: int, like: "Survey") -> OutsideProfile:
        """Interpolate between the nearest sizes below and above, or extrapolate from the two nearest."""
        known = self._known_outside(like)
        if rows in known or len(known) < 2:
            return known.get(rows) or next(iter(known.values()))
        sizes = sorted(known)
        at = min(max(1, bisect(sizes, rows)), len(sizes) - 1)
        below, above = sizes[at - 1], sizes[at]
        return known[below].in_line(known[above], (rows - below) / (above - below))

    def suppose(self, rows: int, like: "Survey") -> None:
        """Estimate a size without measuring (and compiling) it: blocks grow as those of `like` do.

        Its GPU time per row is at most that of the nearest measured size, so a size that may be fastest is measured
        before it is ruled out.
        """
        if rows in self.measured or not self.measured or len(like.measured) < 2:
            return
        base = min(self.measured, key=lambda known: max(known / rows, rows / known))
        low, high = like.sizes[min(like.measured)], like.sizes[max(like.measured)]
        there = like.sizes[base] if base in like.measured else _in_line(low, high, base)
        sizes = [self.sizes[base], there, _in_line(low, high, rows)]
        size = _mixed(lambda one, other, more: one * more / other if other else one, rows, *sizes)
        for kind, ways in size.blocks.items():
            kept, its_base = ways[KEEP], self.sizes[base].blocks[kind][KEEP]
            forward_s = min(kept.forward_s, rows / base * its_base.forward_s)
            backward_s = min(kept.backward_s, rows / base * its_base.backward_s)
            ways[KEEP] = replace(kept, forward_s=forward_s, backward_s=backward_s)
        self.sizes[rows] = self._with_ways(replace(size, outside=self._outside_at(rows, like)))
        self.supposed.add(rows)

    def drop(self, rows: int) -> None:
        del self.sizes[rows]
        self.supposed.discard(rows)

    def forget_operators(self) -> bool:
        """Forget modes that save the outputs of single operators; return whether there were any."""
        kinds = [ways for detailed in self._ways_at.values() for ways in detailed.values()]
        found = [(ways, mode) for ways in kinds for mode in ways if mode.startswith(OPERATORS)]
        for ways, mode in found:
            del ways[mode]
        self.sizes = {size.rows: self._with_ways(size) for size in self.sizes.values()}
        return bool(found)

    def _measure_modes(self, name: str, call: measuring.BlockCall, modes: Collection[str]) -> dict[str, BlockProfile]:
        """Measure a block as it is, and in each of these modes that frees enough of what it saves."""
        ways = {KEEP: measuring.measure_block(self.meter, call)}
        least_s = ways[KEEP].forward_s + ways[KEEP].backward_s
        for mode in modes:
            try:
                undo = Recompute(modes={name: recompute_mode(mode)}).apply(self.training)
            except NotApplicable:
                continue
            try:
                way = measuring.measure_block(self.meter, call)
            finally:
                undo()
            # What is computed twice is never faster than once, but a card that idled while code was compiled has a higher
            # clock for a while: believed, such a mode would be chosen for its speed.
            ways[mode] = replace(way, backward_s=max(way.backward_s, (1 + _AGAIN) * least_s - way.forward_s))
        most_bytes = (1 - _WORTHWHILE) * ways[KEEP].kept_bytes
        return {mode: way for mode, way in ways.items() if mode == KEEP or way.kept_bytes < most_bytes}

    def _with_ways(self, size: SizeProfile) -> SizeProfile:
        """Add the modes of the nearest detailed size: a part's share of its block is about constant."""
        if not self._ways_at:
            return size
        ways = self._ways_at[self._nearest_detail(size.rows)]
        blocks = {kind: _all_ways(ways.get(_stem(kind), {}), kept[KEEP]) for kind, kept in size.blocks.items()}
        return replace(size, blocks=blocks)

    def _nearest_detail(self, rows: int) -> int:
        return min(self._ways_at, key=lambda known: (max(known / rows, rows / known), known))

    def _operator_modes(self, block: nn.Module, call: measuring.BlockCall) -> list[str]:
        """Return the fastest choices of saved operators at a few byte levels. A compiled block has none."""
        if "compile" in self.training.applied:
            return []
        clock = virtual_clock(card_of(self.meter.device)) if self.meter.virtual else event_clock
        args, kwargs = call.with_gradient()
        with measuring.dropped_gradients(block), call.surroundings():
            operators = profile_operators(block, args, kwargs, clock)
        choices = frontier(operators, measuring.bytes_of(call.hidden), levels=_OPERATOR_LEVELS)
        return [OPERATORS + ",".join(choice.mode) for choice in choices[1:-1] if choice.kept]


def _in_line(low: SizeProfile, high: SizeProfile, rows: int) -> SizeProfile:
    """Interpolate linearly in the rows between two sizes."""
    share = (rows - low.rows) / (high.rows - low.rows)
    return _mixed(lambda below, above: max(0.0, below + share * (above - below)), rows, low, high)


def _mixed(mix: Callable[..., float], rows: int, *sizes: SizeProfile) -> SizeProfile:
    """Return the first size with each number of its kept blocks mixed with those of the other sizes."""
    names = {kind: name for name, kind in sizes[0].kinds.items()}
    blocks = {kind: {KEEP: mixed(mix, *(size.kept(name) for size in sizes))} for kind, name in names.items()}
    return replace(sizes[0], rows=rows, blocks=blocks)


def _stem(kind: str) -> str:
    return kind.rpartition("|")[0]


def recompute_mode(name: str) -> str | list[str]:
    """Return a mode in the form that `Recompute` takes."""
    return name.removeprefix(OPERATORS).split(",") if name.startswith(OPERATORS) else name


def _all_ways(measured: dict[str, BlockProfile], kept: BlockProfile) -> dict[str, BlockProfile]:
    """Return a block as it is, and modes measured at another size in proportion."""
    parts = {mode: way for mode, way in measured.items() if mode != KEEP}

    def scaled(way: float, its_kept: float, here: float) -> float:
        return way * here / its_kept if its_kept else here

    return {KEEP: kept, **{mode: mixed(scaled, way, measured[KEEP], kept) for mode, way in parts.items()}}


def _modes(ways: dict[str, BlockProfile], *, offload: bool, recompute: bool) -> list[BlockProfile]:
    kept = ways[KEEP]
    modes = [replace(way, name=name) for name, way in ways.items() if recompute or name == KEEP]
    # Recomputed: forward runs again during backward, when everything it saves is alive.
    again = replace(
        modes[0],
        name=BLOCK,
        kept_bytes=kept.input_bytes,
        backward_peak_bytes=max(kept.forward_peak_bytes, kept.kept_bytes + kept.backward_peak_bytes),
        backward_s=kept.backward_s + kept.forward_s,
        forward_host_s=2 * kept.forward_host_s,
    )
    # Offloaded: saved tensors are on the host meanwhile, and back during backward. Large copies slow the kernels they
    # overlap with and queue behind each other: on an H200 they always cost this much more than the transfer time that
    # could not be hidden.
    offloaded = replace(
        modes[0],
        name=OFFLOAD,
        kept_bytes=0,
        backward_peak_bytes=kept.kept_bytes + kept.backward_peak_bytes,
        backward_s=kept.backward_s + kept.kept_bytes * _STALL_S_PER_BYTE,
        moved_bytes=kept.kept_bytes,
    )
    again_offloaded = replace(
        again,
        name=BLOCK_OFFLOAD,
        kept_bytes=0,
        backward_peak_bytes=again.backward_peak_bytes + kept.input_bytes,
        moved_bytes=kept.input_bytes,
    )
    modes += [again] if recompute else []
    modes += [offloaded] if offload else []
    modes += [again_offloaded] if offload and recompute else []
    return modes
