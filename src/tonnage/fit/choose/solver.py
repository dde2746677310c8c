"""Find the fastest set of techniques within GPU and host budgets: every layout and placement, solved exactly.

A layout says how the batch is divided: into micro-batches, or into one batch whose blocks recompute in slices. It
does not know how a technique is applied.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np

from tonnage.errors import TonnageError
from tonnage.fit.choose.choosing import MemoryContext, ModeChoice, choose_modes, least_seconds
from tonnage.fit.choose.placement import Placement, ResidentState, suitable
from tonnage.fit.survey.profile import BlockProfile, OutsideProfile, mixed
from tonnage.fit.survey.survey import BLOCK, BLOCK_OFFLOAD, KEEP, OFFLOAD, SizeProfile, Survey
from tonnage.hardware.catalogue import cuda_cards, first_that_holds
from tonnage.units import format_bytes

_PRECISION = 1 / 128  # relative to the smallest budget


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """`micro_batches` of `rows` each; recomputed blocks run in `slices`."""

    rows: int
    micro_batches: int
    slices: int = 1
    sliced: bool = True  # False: scaled from a measured size, and nothing runs in slices


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout, placement and use of the link; only each block's mode is left to choose."""

    layout: BatchLayout
    profiled_rows: int  # the size whose block profiles it uses
    placement: Placement
    window_bytes: int  # of copies in flight, if activations are offloaded
    modes: list[list[BlockProfile]]
    around: MemoryContext
    overhead_s: float
    launches_s: float  # host time for parameter steps in the last micro-batch

    def seconds(self, micro_batch_s: float, host_s: float = 0.0) -> float:
        """Return the seconds of a step; the host's launch time counts if it exceeds the GPU time."""
        outside = self.around.outside
        gpu_s = micro_batch_s + outside.forward_s + outside.backward_s
        host_s += outside.forward_host_s + outside.backward_host_s
        last_s = max(gpu_s, host_s + self.launches_s)
        return (self.layout.micro_batches - 1) * max(gpu_s, host_s) + last_s + self.overhead_s


@dataclass(frozen=True, kw_only=True)
class Solution(Candidate):
    """A candidate with the mode of each block."""

    choice: ModeChoice
    states_on_gpu_bytes: int
    peak_bytes: int
    step_s: float


def solve(
    sizes: dict[int, SizeProfile],
    resident: ResidentState,
    *,
    batch_rows: int,
    budget_bytes: int,
    sliceable: bool,
    divisible: bool,
    allowed: frozenset[str],
    among: Collection[int] | None = None,
    without: BatchLayout | None = None,
    outside: Mapping[int, OutsideProfile] | None = None,
) -> list[Solution]:
    """Return what fits, fastest first. Candidates are solved in order of a lower bound, until none can be faster.

    `among` limits the block sizes that may run, `without` excludes a layout, and `outside` adds profiles of the rest
    at sizes whose blocks do not fit.
    """
    movable: tuple[tuple[str, ...], ...] = ((),)  # sets of modes that use the link
    if "activation-offload" in allowed:
        movable = ((), (BLOCK_OFFLOAD,), (BLOCK_OFFLOAD, OFFLOAD)) if "recompute" in allowed else ((), (OFFLOAD,))
    candidates = [
        _candidate(sizes, outside or {}, resident, layout, placement, budget_bytes, moved, allowed)
        for layout in layouts(sizes, batch_rows, sliceable=sliceable, divisible=divisible)
        if layout != without and (among is None or _profiled_rows(sizes, layout) in among)
        for placement in suitable(resident, layout.micro_batches, allowed)
        for moved in movable
    ]
    found: list[Solution] = []
    # A quick bound first; a tighter one only for candidates that are still competitive.
    waiting = []
    for index, candidate in enumerate(candidates):
        quickest_s = sum(min(mode.forward_s + mode.backward_s for mode in ways) for ways in candidate.modes)
        waiting.append((candidate.seconds(quickest_s), index, False))
    heapify(waiting)
    while waiting:
        bound_s, index, close = heappop(waiting)
        if found and bound_s >= found[0].step_s:
            break
        candidate = candidates[index]
        if not close:
            bound_s = candidate.seconds(least_seconds(candidate.modes, candidate.around))
            if np.isfinite(bound_s):
                heappush(waiting, (bound_s, index, True))
        elif (choice := choose_modes(candidate.modes, candidate.around)) is not None:
            micro_batches = candidate.layout.micro_batches
            solution = Solution(
                **vars(candidate),
                choice=choice,
                states_on_gpu_bytes=candidate.placement.states_on_gpu(resident, micro_batches, choice.unmoved_bytes),
                peak_bytes=choice.peak_bytes,
                step_s=candidate.seconds(choice.micro_batch_s, choice.host_s) + choice.exposed_states_s,
            )
            found.append(solution)
            found.sort(key=lambda solution: (solution.step_s, solution.peak_bytes))
    return found


def layouts(
    sizes: dict[int, SizeProfile], batch_rows: int, *, sliceable: bool, divisible: bool
) -> Iterator[BatchLayout]:
    """Yield sizes as micro-batches or slices; if neither is allowed and the whole batch is not among them, scaled to it."""
    for rows in sorted(sizes):
        if divisible or rows == batch_rows:
            yield BatchLayout(rows=rows, micro_batches=-(-batch_rows // rows))
        if rows < batch_rows and (sliceable or batch_rows not in sizes):
            yield BatchLayout(rows=batch_rows, micro_batches=1, slices=-(-batch_rows // rows), sliced=sliceable)


def _candidate(
    sizes: dict[int, SizeProfile],
    known_outside: Mapping[int, OutsideProfile],
    resident: ResidentState,
    layout: BatchLayout,
    placement: Placement,
    budget_bytes: int,
    moved: tuple[str, ...],
    allowed: frozenset[str],
) -> Candidate:
    size = sizes[_profiled_rows(sizes, layout)]
    # Filter the modes, keeping lists shared between blocks that share them.
    unwanted = {OFFLOAD, BLOCK_OFFLOAD} - set(moved)
    all_modes = block_modes(size, layout, offload=True)
    fewer = {
        id(ways): [m for m in ways if m.name not in unwanted and ("recompute" in allowed or m.name in (KEEP, *moved))]
        for ways in all_modes
    }
    modes = [fewer[id(ways)] for ways in all_modes]
    outside = outside_at(sizes, layout.rows, known_outside)
    backward_s = sum(ways[0].backward_s for ways in modes)
    # The window of copies: two inputs, or a whole block, whose copies then overlap with the next blocks.
    times = {BLOCK_OFFLOAD: 2, OFFLOAD: 1} if moved else {}
    window = max((mode.moved_bytes * times.get(mode.name, 0) for ways in modes for mode in ways), default=0)
    return Candidate(
        layout=layout,
        profiled_rows=size.rows,
        placement=placement,
        window_bytes=window,
        modes=modes,
        around=placement.memory_context(
            resident, outside, budget_bytes, layout.micro_batches, backward_s=backward_s, extra_bytes=window
        ),
        overhead_s=placement.step_overhead_s(resident, layout.micro_batches, backward_s),
        launches_s=placement.launches_s(resident),
    )


def _profiled_rows(sizes: Iterable[int], layout: BatchLayout) -> int:
    """Return the size whose blocks a layout runs. If several give as many slices, take the largest."""
    if layout.slices == 1:
        return layout.rows
    return max(rows for rows in sizes if -(-layout.rows // rows) == layout.slices)


def block_modes(size: SizeProfile, layout: BatchLayout, *, offload: bool) -> list[list[BlockProfile]]:
    """Return the modes of each block in this layout; lists are shared between blocks of a kind."""
    modes = size.modes(offload=offload)
    if layout.slices == 1:
        return modes
    by_kind = dict(zip(size.kinds.values(), modes, strict=True))
    made = {kind: [_larger(mode, size.blocks[kind][KEEP], layout) for mode in ways] for kind, ways in by_kind.items()}
    return [made[kind] for kind in size.kinds.values()]


def outside_at(
    sizes: dict[int, SizeProfile], rows: int, known: Mapping[int, OutsideProfile] | None = None
) -> OutsideProfile:
    """Return the outside profile at a size, extrapolated from the two largest if not measured."""
    if rows in sizes:
        return sizes[rows].outside
    if known and rows in known:
        return known[rows]
    low, high = sorted(sizes)[-2:] if len(sizes) > 1 else (0, max(sizes))
    larger = sizes[high].outside
    smaller = sizes[low].outside if low else mixed(lambda _: 0.0, larger)
    return smaller.in_line(larger, (rows - low) / (high - low))


def _larger(mode: BlockProfile, kept: BlockProfile, layout: BatchLayout) -> BlockProfile:
    """Scale a mode to a batch `slices` times as large: recomputed blocks may run slice by slice, others whole."""
    slices, scaled = layout.slices, ["forward_s", "backward_s", "input_bytes", "kept_bytes", "moved_bytes"]
    in_slices = layout.sliced and mode.name in (BLOCK, BLOCK_OFFLOAD)
    if not in_slices:
        scaled += ["forward_peak_bytes", "backward_peak_bytes"]
    found: dict[str, Any] = {name: getattr(mode, name) * slices for name in scaled}
    if in_slices:
        # Besides the slice: the whole output or input gradient, and the sum of the block's gradients.
        passing_bytes = kept.input_bytes * slices
        more_bytes = (slices - 1) * mode.moved_bytes + passing_bytes + kept.parameters_bytes
        found["forward_host_s"], found["backward_host_s"] = mode.host_s * slices, 0.0
        found["forward_peak_bytes"] = kept.forward_peak_bytes - kept.kept_bytes + passing_bytes
        found["backward_peak_bytes"] = mode.backward_peak_bytes + more_bytes
    return replace(mode, **found)


# Where nothing fits ---------------------------------------------------------------------------------------------------


class DoesNotFit(TonnageError, MemoryError):
    """No set of techniques brings the training within the budget."""

    exit_code = 1

    def __init__(self, problem: str, *, hint: str, smallest_bytes: int | None) -> None:
        super().__init__(problem, hint=hint)
        self.smallest_bytes = smallest_bytes


def does_not_fit(
    resident: ResidentState, budget_bytes: int, smallest: Solution | None, needed_bytes: int
) -> DoesNotFit:
    """Build the error; `smallest` is the solution of least memory, which needs `needed_bytes`."""
    problem = (
        f"Nothing that keeps the gradients fits {format_bytes(budget_bytes)}: parameters take "
        f"{format_bytes(resident.parameters_bytes)}, what else is on the card (the sample, library workspaces) "
        f"{format_bytes(resident.besides_bytes)}, gradients {format_bytes(resident.gradients_bytes)}, optimizer states "
        f"{format_bytes(resident.states_bytes)}."
    )
    if smallest is None:
        hint = "Even one row with every technique does not fit this card: use a shorter sequence, or more GPUs."
        return DoesNotFit(problem, hint=hint, smallest_bytes=None)
    layout = smallest.layout
    parts = [f"{layout.micro_batches} micro-batches"] if layout.micro_batches > 1 else []
    if layout.slices > 1:
        parts.append(f"blocks recomputed in {layout.slices} slices")
    if smallest.placement.name != "plain":
        parts.append(smallest.placement.name)
    words = ", ".join(parts) or "the same techniques"
    # The smallest card of the catalogue that holds it, with 5 % to spare for the CUDA context.
    cards = [gpu for gpu in cuda_cards() if gpu.family != "laptop"]
    gpu = first_that_holds(cards, lambda gpu: gpu.memory_bytes * 0.95 > needed_bytes)
    card = "; no single card has that much."
    if gpu:
        card = f"; the next card that has it is {gpu.name} ({format_bytes(gpu.memory_bytes)})."
    hint = f"The smallest budget that would do is {format_bytes(needed_bytes)}, with {words}{card}"
    return DoesNotFit(problem, hint=hint, smallest_bytes=needed_bytes)


def smallest_budget(survey: Survey, resident: ResidentState, **options: Any) -> Solution | None:
    """Bisect for the smallest budget; `options` are passed on to `solve`."""

    def best(budget_bytes: int) -> Solution | None:
        found = solve(survey.sizes, resident, budget_bytes=budget_bytes, **options)
        return min(found, key=lambda solution: solution.peak_bytes, default=None)

    high = 4 * survey.meter.capacity_bytes
    found = best(high)
    low = resident.held_bytes
    while found is not None and min(high, found.peak_bytes) - low > _PRECISION * found.peak_bytes:
        high = min(high, found.peak_bytes)
        middle = (low + high) // 2
        smaller = best(middle)
        found, low = (smaller, low) if smaller is not None else (found, middle)
    return found
