"""What a training costs, micro-batch size by micro-batch size, in every way that its blocks can be run.

Each kind of block is measured once for each size: as it stands, and with its parts recomputed. From those follow the
modes that the solver chooses among. It does not know budgets nor which mode is best.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import nn

from tonnage.fit.choose.choosing import Mode
from tonnage.fit.choose.frontier import frontier
from tonnage.fit.measure.measuring import (
    BlockCall,
    Calls,
    Required,
    bytes_of,
    capture_calls,
    draw_others,
    dropped_gradients,
    measure_block,
    measure_outside,
    required_gradients,
    undisturbed,
)
from tonnage.fit.measure.meter import Meter
from tonnage.fit.measure.profile import BlockProfile, OutsideProfile
from tonnage.fit.measure.roofline_clock import card_of
from tonnage.fit.modules import find_blocks
from tonnage.fit.recomputing.operators import event_clock, profile_operators, roofline_clock
from tonnage.fit.stepping.batches import batch_rows, take_rows
from tonnage.fit.technique import NotApplicable
from tonnage.fit.techniques.recompute import Recompute, recomputable
from tonnage.fit.training import Batch, Training

KEEP, BLOCK, OFFLOAD, BLOCK_OFFLOAD = "keep", "block", "offload", "block+offload"
OPERATORS = "operators:"  # and the calls whose outputs stay: "operators:17:aten.mm.default,20:aten.mm.default"
_OPERATOR_LEVELS = 6
# A part is worth recomputing alone where it leaves at least this share of what its block keeps.
_WORTHWHILE = 0.1
_STALL_S_PER_BYTE = 1.5e-11  # 23 GB each way took 0.34 s longer, 41 GB 0.85 s
_PARTS = ("mlp", "ffn", "feed_forward", "attn", "attention")


@dataclass(frozen=True)
class SizeProfile:
    """One micro-batch of so many rows."""

    rows: int
    kinds: dict[str, str]  # block → kind
    blocks: dict[str, dict[str, BlockProfile]]  # kind → "keep" or "part:mlp" → what it costs
    outside: OutsideProfile
    unrepeatable: frozenset[str] = frozenset()  # kinds that may not run twice

    def modes(self, *, offload: bool) -> list[list[Mode]]:
        """Of each block, in order, every way to run it."""
        by_kind = {
            kind: _modes(ways, offload=offload, recompute=_stem(kind) not in self.unrepeatable)
            for kind, ways in self.blocks.items()
        }
        return [by_kind[kind] for kind in self.kinds.values()]

    @property
    def alone_bytes(self) -> int:
        """What it takes to measure one of its blocks, or the rest, alone."""
        blocks = (way.kept_bytes + way.forward_peak_bytes for ways in self.blocks.values() for way in ways.values())
        return max([self.outside.peak_bytes, self.outside.stem_peak_bytes, *blocks])

    def kept(self, block: str) -> BlockProfile:
        return self.blocks[self.kinds[block]][KEEP]


class Survey:
    """Measures a size when it is first asked for. The techniques that always pay are in place already."""

    def __init__(self, training: Training, meter: Meter) -> None:
        self.training, self.meter = training, meter
        self.blocks = find_blocks(training.model)
        self.rows = batch_rows(training.sample)
        self.sizes: dict[int, SizeProfile] = {}
        self._required: dict[str, Required] | None = None
        self.by_chance = False  # whether a pass leaves some blocks out
        self._ways_of: dict[str, dict[str, BlockProfile]] = {}  # by what a kind is without its inputs
        self.supposed: set[int] = set()  # sizes that were not measured
        self.unrepeatable: dict[str, str] = {}  # the same, and why such blocks may not run twice

    def at(self, rows: int) -> SizeProfile:
        if rows not in self.sizes or rows in self.supposed:
            with self._as_at_first():
                self.sizes[rows] = self._measure(rows)
            self.supposed.discard(rows)
        return self.sizes[rows]

    @contextmanager
    def _as_at_first(self) -> Iterator[None]:
        """What a model carries from batch to batch would not suit a batch of another size. Random numbers are others."""
        draw_others(self.training.device)
        with undisturbed(self.training.model, self.training.device):
            yield

    def _measure(self, rows: int) -> SizeProfile:
        batch = take_rows(self.training.sample, slice(0, rows))
        calls = self._capture(batch)
        self.blocks = {name: self.blocks[name] for name in calls.kinds}  # those that run
        blocks = {
            kind: {KEEP: measure_block(self.training, self.meter, name, self.blocks[name], call)}
            for kind, (name, call) in calls.by_kind.items()
        }
        outside = measure_outside(self.training, self.meter, self.blocks, calls, batch)
        ways = self._with_ways(blocks) if self._ways_of else blocks
        return SizeProfile(rows, calls.kinds, ways, outside, frozenset(self.unrepeatable))

    def _capture(self, batch: Batch) -> Calls:
        if self._required is None:
            self._required = required_gradients(self.training, self.blocks, batch)
        calls = capture_calls(self.training, self.blocks, batch, self._required)
        self.by_chance |= calls.by_chance
        return calls

    def detail(self) -> None:
        """Measure the parts and operators of blocks too, at the smallest size; at others they are in proportion."""
        if self._ways_of:
            return
        with self._as_at_first():
            calls = self._capture(take_rows(self.training.sample, slice(0, min(self.sizes))))
            reasons = recomputable(self.training, list(calls.kinds))
            self.unrepeatable = {_stem(calls.kinds[name]): reason for name, reason in reasons.items() if reason}
            for kind, (name, call) in calls.by_kind.items():
                self._ways_of[_stem(kind)] = self._measure_ways(name, call)
        self.sizes = {
            rows: replace(size, blocks=self._with_ways(size.blocks), unrepeatable=frozenset(self.unrepeatable))
            for rows, size in self.sizes.items()
        }

    def between(self, rows: int) -> None:
        """A size in line with the two measured ones around it, where measuring it would mean to compile it."""
        low = max((size for size in self.sizes if size < rows), default=None)
        high = min((size for size in self.sizes if size > rows), default=None)
        if rows not in self.sizes and low is not None and high is not None:
            self.sizes[rows] = _in_line(self.sizes[low], self.sizes[high], rows)
            self.supposed.add(rows)

    @property
    def has_operators(self) -> bool:
        """Whether there are modes in which single operators of a block are kept."""
        return any(mode.startswith(OPERATORS) for ways in self._ways_of.values() for mode in ways)

    def forget_operators(self) -> None:
        """Leave only modes that recompute a block whole or in part."""
        self._ways_of = {stem: _without_operators(ways) for stem, ways in self._ways_of.items()}
        self.sizes = {
            rows: replace(size, blocks={kind: _without_operators(ways) for kind, ways in size.blocks.items()})
            for rows, size in self.sizes.items()
        }

    def _measure_ways(self, name: str, call: BlockCall) -> dict[str, BlockProfile]:
        block = self.blocks[name]
        ways = {KEEP: measure_block(self.training, self.meter, name, block, call)}
        for mode in [*_part_modes(block), *self._operator_modes(block, call)]:
            with self._placed(Recompute(modes={name: recompute_mode(mode)})) as placed:
                if placed:
                    ways[mode] = measure_block(self.training, self.meter, name, block, call)
        return {mode: way for mode, way in ways.items() if mode == KEEP or _worthwhile(way, ways[KEEP])}

    def _with_ways(self, blocks: dict[str, dict[str, BlockProfile]]) -> dict[str, dict[str, BlockProfile]]:
        """A part's share of its block is the same at every size; compiling it for each would take long."""
        return {
            kind: self._in_proportion(self._ways_of.get(_stem(kind), {}), ways[KEEP]) for kind, ways in blocks.items()
        }

    def _in_proportion(self, measured: dict[str, BlockProfile], kept: BlockProfile) -> dict[str, BlockProfile]:
        parts = {mode: way for mode, way in measured.items() if mode != KEEP}
        return {KEEP: kept, **{mode: _in_proportion(way, measured[KEEP], kept) for mode, way in parts.items()}}

    def _operator_modes(self, block: nn.Module, call: BlockCall) -> list[str]:
        """The fastest choices of operators at a few numbers of bytes. A compiled block shows none."""
        if "compile" in self.training.applied:
            return []
        clock = roofline_clock(card_of(self.meter.device)) if self.meter.virtual else event_clock
        args, kwargs = call.with_gradient()
        with dropped_gradients(block), call.surroundings(self.training):
            operators = profile_operators(block, args, kwargs, clock)
        choices = frontier(operators, bytes_of(call.hidden), levels=_OPERATOR_LEVELS)
        return [OPERATORS + ",".join(choice.mode) for choice in choices[1:-1] if choice.kept]

    @contextmanager
    def _placed(self, technique: Recompute) -> Iterator[bool]:
        try:
            undo = technique.apply(self.training)
        except NotApplicable:
            yield False
            return
        try:
            yield True
        finally:
            undo()


def _without_operators(ways: dict[str, BlockProfile]) -> dict[str, BlockProfile]:
    return {mode: way for mode, way in ways.items() if not mode.startswith(OPERATORS)}


def _in_line(low: SizeProfile, high: SizeProfile, rows: int) -> SizeProfile:
    share = (rows - low.rows) / (high.rows - low.rows)

    def mixed(one: Any, other: Any) -> Any:
        """One profile between two: bytes and seconds grow with the rows."""
        numbers = {f.name: getattr(one, f.name) for f in fields(one) if isinstance(getattr(one, f.name), int | float)}
        found = {name: value + share * (getattr(other, name) - value) for name, value in numbers.items()}
        return replace(one, **{name: round(v) if isinstance(numbers[name], int) else v for name, v in found.items()})

    of_high = {kind: high.kinds[name] for name, kind in low.kinds.items()}
    blocks = {
        kind: {mode: mixed(way, high.blocks[of_high[kind]][mode]) for mode, way in ways.items()}
        for kind, ways in low.blocks.items()
    }
    return replace(low, rows=rows, blocks=blocks, outside=mixed(low.outside, high.outside))


def _stem(kind: str) -> str:
    """A kind whatever the size of its inputs."""
    return kind.rpartition("|")[0]


def recompute_mode(name: str) -> str | list[str]:
    """A mode as `Recompute` takes it."""
    return name.removeprefix(OPERATORS).split(",") if name.startswith(OPERATORS) else name


def _in_proportion(way: BlockProfile, its_kept: BlockProfile, kept: BlockProfile) -> BlockProfile:
    """`way` at the size of `kept`, as it was beside `its_kept`."""

    def scaled(field: str) -> int:
        return round(getattr(way, field) * getattr(kept, field) / max(1, getattr(its_kept, field)))

    return replace(
        kept,
        kept_bytes=scaled("kept_bytes"),
        forward_peak_bytes=scaled("forward_peak_bytes"),
        backward_peak_bytes=scaled("backward_peak_bytes"),
        forward_s=way.forward_s * kept.forward_s / its_kept.forward_s,
        backward_s=way.backward_s * kept.backward_s / its_kept.backward_s,
    )


def _part_modes(block: nn.Module) -> list[str]:
    names = [name for name, child in block.named_children() if any(True for _ in child.parameters())]
    return [f"part:{name}" for name in names if any(part in name.lower() for part in _PARTS) and "norm" not in name]


def _worthwhile(way: BlockProfile, kept: BlockProfile) -> bool:
    return way.kept_bytes < (1 - _WORTHWHILE) * kept.kept_bytes


def _modes(ways: dict[str, BlockProfile], *, offload: bool, recompute: bool) -> list[Mode]:
    kept = ways[KEEP]
    if not recompute:
        return [_as_it_is(KEEP, kept), *([_offloaded(kept)] if offload else [])]
    modes = [_as_it_is(name, way) for name, way in ways.items()]
    modes.append(_recomputed(BLOCK, kept, resident_bytes=kept.input_bytes, moved_bytes=0))
    if offload:
        modes.append(_offloaded(kept))
        modes.append(_recomputed(BLOCK_OFFLOAD, kept, resident_bytes=0, moved_bytes=kept.input_bytes))
    return modes


def _as_it_is(name: str, way: BlockProfile) -> Mode:
    return Mode(
        name=name,
        resident_bytes=way.kept_bytes,
        forward_peak_bytes=way.forward_peak_bytes,
        backward_peak_bytes=way.backward_peak_bytes,
        forward_s=way.forward_s,
        backward_s=way.backward_s,
    )


def _recomputed(name: str, kept: BlockProfile, *, resident_bytes: int, moved_bytes: int) -> Mode:
    """Forward runs again in backward, and all that it keeps is there then."""
    again_bytes = max(kept.forward_peak_bytes, kept.kept_bytes + kept.backward_peak_bytes)
    return Mode(
        name=name,
        resident_bytes=resident_bytes,
        forward_peak_bytes=kept.forward_peak_bytes,
        backward_peak_bytes=again_bytes + moved_bytes,
        forward_s=kept.forward_s,
        backward_s=kept.backward_s + kept.forward_s,
        moved_bytes=moved_bytes,
    )


def _offloaded(kept: BlockProfile) -> Mode:
    """What backward keeps is on the host meanwhile, and back while it runs.

    Copies of that size slow what they run beside and wait for each other: in all cases measured on an H200 they cost this
    much more than the link's own time that could not be hidden.
    """
    return Mode(
        name=OFFLOAD,
        resident_bytes=0,
        forward_peak_bytes=kept.forward_peak_bytes,
        backward_peak_bytes=kept.kept_bytes + kept.backward_peak_bytes,
        forward_s=kept.forward_s,
        backward_s=kept.backward_s + kept.kept_bytes * _STALL_S_PER_BYTE,
        moved_bytes=kept.kept_bytes,
    )
