"""The fastest set of techniques within the budgets of GPU and host: every layout and placement, each solved exactly.

A layout is how the batch is divided: into micro-batches of so many rows, or into one batch whose blocks recompute in
slices. It does not know how a technique is applied.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tonnage.fit.choosing import Choice, Mode, choose_modes
from tonnage.fit.placement import Holdings, Placement, states_on_gpu, step_overhead_s, suitable, surroundings
from tonnage.fit.profile import BlockProfile, OutsideProfile
from tonnage.fit.survey import BLOCK, BLOCK_OFFLOAD, KEEP, OFFLOAD, SizeProfile

# Copies under way that an offload keeps on the GPU, at least.
LEAST_WINDOW_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Layout:
    """`micro_batches` of `rows` each; what is recomputed of a block runs in `slices`."""

    rows: int
    micro_batches: int
    slices: int = 1
    sliced: bool = True  # False: the size is in proportion to one that was measured, and nothing runs in slices


@dataclass(frozen=True, kw_only=True)
class Solution:
    layout: Layout
    placement: Placement
    choice: Choice
    window_bytes: int  # of copies under way, where activations are offloaded
    states_on_gpu_bytes: int
    peak_bytes: int
    step_s: float


def solve(
    sizes: dict[int, SizeProfile],
    holdings: Holdings,
    *,
    batch_rows: int,
    budget_bytes: int,
    sliceable: bool,
    divisible: bool,
    allowed: frozenset[str],
) -> list[Solution]:
    """All that fits, fastest first."""
    found = [
        solution
        for layout in layouts(sizes, batch_rows, sliceable=sliceable, divisible=divisible)
        for placement in suitable(holdings, layout.micro_batches, allowed)
        for offloads in (False, True)[: 1 + ("activation-offload" in allowed)]
        if (solution := _solve_one(sizes, holdings, layout, placement, budget_bytes, offloads, allowed)) is not None
    ]
    return sorted(found, key=lambda solution: (solution.step_s, solution.peak_bytes))


def layouts(sizes: dict[int, SizeProfile], batch_rows: int, *, sliceable: bool, divisible: bool) -> Iterator[Layout]:
    """Sizes that were measured, as micro-batches or as slices; where neither may be, in proportion for the whole batch."""
    for rows in sorted(sizes):
        if divisible or rows == batch_rows:
            yield Layout(rows=rows, micro_batches=-(-batch_rows // rows))
        if rows < batch_rows:
            yield Layout(rows=batch_rows, micro_batches=1, slices=-(-batch_rows // rows), sliced=sliceable)


def _solve_one(
    sizes: dict[int, SizeProfile],
    holdings: Holdings,
    layout: Layout,
    placement: Placement,
    budget_bytes: int,
    offloads: bool,
    allowed: frozenset[str],
) -> Solution | None:
    size = sizes[layout.rows] if layout.slices == 1 else sizes[-(-layout.rows // layout.slices)]
    modes = block_modes(size, layout, offload=offloads)
    if "recompute" not in allowed:
        modes = [[mode for mode in ways if mode.name in (KEEP, OFFLOAD)] for ways in modes]
    outside = scaled_outside(size.outside, layout.slices)
    backward_s = sum(ways[0].backward_s for ways in modes)
    window = offload_window(modes) if offloads else 0
    around = surroundings(
        placement,
        holdings,
        outside,
        budget_bytes=budget_bytes,
        micro_batches=layout.micro_batches,
        backward_s=backward_s,
        extra_bytes=window,
    )
    choice = choose_modes(modes, around)
    if choice is None or (offloads and not choice.moved_bytes):
        return None
    micro_batch_s = choice.micro_batch_s + outside.forward_s + outside.backward_s
    step_s = layout.micro_batches * micro_batch_s + choice.exposed_states_s
    return Solution(
        layout=layout,
        placement=placement,
        choice=choice,
        window_bytes=window,
        states_on_gpu_bytes=states_on_gpu(placement, holdings, layout.micro_batches, choice.unmoved_bytes),
        peak_bytes=choice.peak_bytes,
        step_s=step_s + step_overhead_s(placement, holdings, layout.micro_batches, backward_s),
    )


def offload_window(modes: Sequence[Sequence[Mode]]) -> int:
    """A whole block's copies: they then spread over the blocks that follow instead of holding up the next operator."""
    return max([LEAST_WINDOW_BYTES, *(mode.moved_bytes for ways in modes for mode in ways)])


def block_modes(size: SizeProfile, layout: Layout, *, offload: bool) -> list[list[Mode]]:
    modes = size.modes(offload=offload)
    if layout.slices == 1:
        return modes
    made: dict[tuple[int, str], list[Mode]] = {}
    for ways, block in zip(modes, size.kinds, strict=True):
        kind = size.kinds[block]
        if (id(ways), kind) not in made:
            made[id(ways), kind] = [_larger(mode, size.kept(block), layout) for mode in ways]
    return [made[id(ways), size.kinds[block]] for ways, block in zip(modes, size.kinds, strict=True)]


def scaled_outside(outside: OutsideProfile, factor: int) -> OutsideProfile:
    """The same for a batch so many times as large."""
    return OutsideProfile(
        kept_bytes=outside.kept_bytes * factor,
        peak_bytes=outside.peak_bytes * factor,
        forward_s=outside.forward_s * factor,
        backward_s=outside.backward_s * factor,
    )


def _larger(mode: Mode, kept: BlockProfile, layout: Layout) -> Mode:
    """A mode for a batch `slices` times as large: what is recomputed may run slice by slice, what is kept runs whole."""
    slices = layout.slices
    whole = replace(
        mode,
        forward_s=mode.forward_s * slices,
        backward_s=mode.backward_s * slices,
        resident_bytes=mode.resident_bytes * slices,
        moved_bytes=mode.moved_bytes * slices,
    )
    if mode.name not in (BLOCK, BLOCK_OFFLOAD) or not layout.sliced:
        return replace(
            whole,
            forward_peak_bytes=mode.forward_peak_bytes * slices,
            backward_peak_bytes=mode.backward_peak_bytes * slices,
        )
    # Beside the slice: the whole output or gradient of the input, and the block's gradients, the sum and a slice's.
    passing_bytes = kept.input_bytes * slices
    return replace(
        whole,
        forward_peak_bytes=kept.forward_peak_bytes - kept.kept_bytes + passing_bytes,
        backward_peak_bytes=mode.backward_peak_bytes
        + (slices - 1) * mode.moved_bytes
        + passing_bytes
        + 2 * kept.parameters_bytes,
    )
