"""The choice of modes against every possible one, on small instances."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tonnage.fit.choose.choosing import MemoryContext, ModeChoice, choose_modes, peak_of
from tonnage.fit.survey.profile import BlockProfile, OutsideProfile
from tonnage.units import GIB, MIB

GAP = 2e-3  # what the solver may leave on the table, and rounding
Instance = tuple[list[list[BlockProfile]], MemoryContext]

sizes = st.integers(0, 4096).map(lambda count: count * MIB)
times = st.integers(1, 100).map(lambda count: count / 100)


def outside(kept_bytes: int, peak_bytes: int, between: tuple[int, ...] = ()) -> OutsideProfile:
    return OutsideProfile(
        kept_bytes=kept_bytes, peak_bytes=peak_bytes, between_peak_bytes=between, forward_s=0.0, backward_s=0.0
    )


@st.composite
def modes(draw: st.DrawFn, index: int) -> BlockProfile:
    kept = draw(sizes)
    return BlockProfile(
        name=f"mode {index}",
        parameters_bytes=0,
        input_bytes=0,
        kept_bytes=kept,
        forward_peak_bytes=kept + draw(sizes),
        backward_peak_bytes=draw(sizes),
        forward_s=draw(times),
        backward_s=draw(times),
        moved_bytes=draw(st.sampled_from([0, GIB, 16 * GIB])),
    )


@st.composite
def instances(draw: st.DrawFn) -> Instance:
    count = draw(st.integers(1, 4))
    blocks = [[draw(modes(index)) for index in range(draw(st.integers(1, 3)))] for _ in range(count)]
    grows = draw(st.booleans())
    around = MemoryContext(
        budget_bytes=0,
        fixed_bytes=draw(sizes) // 4,
        outside=outside(
            draw(sizes) // 4,
            draw(sizes) // 2,
            tuple(draw(sizes) // 2 for _ in blocks[1:]) if draw(st.booleans()) else (),
        ),
        gradient_bytes=tuple(draw(sizes) // 8 for _ in blocks) if grows else (),
        outside_gradient_bytes=draw(sizes) // 8 if grows else 0,
        step_peak_bytes=draw(sizes) // 2,
        movable_states_bytes=draw(st.sampled_from([0, GIB, 4 * GIB])),
        states_s_per_byte=draw(st.sampled_from([0.0, 0.05 / GIB])),
        states_window_s=draw(st.sampled_from([0.0, 0.1])),
        host_bytes=draw(st.sampled_from([0, 2 * GIB, 64 * GIB])),
        link_bytes_per_s=20.0 * GIB,
        micro_batches=draw(st.sampled_from([1, 4])),
    )
    peaks = [peak_of(taken, around) for taken in product(*blocks)]
    lowest = min(peaks) - around.movable_states_bytes // 2
    return blocks, replace(around, budget_bytes=draw(st.integers(lowest, max(peaks) + MIB)))


def _seconds(taken: tuple[BlockProfile, ...], around: MemoryContext, moved_states_bytes: int) -> float:
    """What the program minimises, worked out by hand: computation, what the link cannot hide, what copies disturb."""
    moved = sum(mode.moved_bytes for mode in taken)
    forward, backward = sum(mode.forward_s for mode in taken), sum(mode.backward_s for mode in taken)
    link_s = moved / around.link_bytes_per_s
    late = max(0.0, link_s - forward) + max(0.0, link_s - backward)
    late_states = max(0.0, moved_states_bytes * around.states_s_per_byte - around.states_window_s)
    disturbed = (moved + moved_states_bytes / around.micro_batches) * around.s_per_moved_byte
    return forward + backward + late + late_states / around.micro_batches + disturbed


def _every_choice(blocks: list[list[BlockProfile]], around: MemoryContext) -> Iterator[float]:
    for taken in product(*blocks):
        states = max(0, peak_of(taken, around) - around.budget_bytes)
        on_host = states + sum(mode.moved_bytes for mode in taken)
        if states <= around.movable_states_bytes and on_host <= around.host_bytes:
            yield _seconds(taken, around, states)


def _of(
    choice: ModeChoice, blocks: list[list[BlockProfile]], around: MemoryContext
) -> tuple[tuple[BlockProfile, ...], int]:
    taken = tuple(
        next(mode for mode in ways if mode.name == name) for ways, name in zip(blocks, choice.modes, strict=True)
    )
    return taken, around.movable_states_bytes - choice.unmoved_bytes


@settings(max_examples=150)
@given(instances())
def test_no_choice_that_fits_is_faster(instance: Instance) -> None:
    blocks, around = instance
    choice, best = choose_modes(blocks, around), min(_every_choice(blocks, around), default=None)
    assert (choice is None) == (best is None)
    if choice is not None and best is not None:
        taken, moved_states = _of(choice, blocks, around)
        assert _seconds(taken, around, moved_states) <= best * (1 + GAP)


@settings(max_examples=150)
@given(instances())
def test_what_is_chosen_is_within_the_budgets(instance: Instance) -> None:
    blocks, around = instance
    choice = choose_modes(blocks, around)
    assume(choice is not None)
    assert choice is not None
    taken, moved_states = _of(choice, blocks, around)
    assert choice.peak_bytes == peak_of(taken, around, moved_states)
    assert choice.peak_bytes <= around.budget_bytes
    assert 0 <= choice.unmoved_bytes <= around.movable_states_bytes
    assert choice.moved_bytes + moved_states <= around.host_bytes


@settings(max_examples=100)
@given(instances(), st.integers(1, 2048))
def test_less_budget_is_never_faster_and_never_more_memory(instance: Instance, fewer_mib: int) -> None:
    blocks, around = instance
    less = replace(around, budget_bytes=around.budget_bytes - fewer_mib * MIB)
    more, fewer = choose_modes(blocks, around), choose_modes(blocks, less)
    assume(fewer is not None)
    assert more is not None and fewer is not None
    assert fewer.peak_bytes <= less.budget_bytes
    slower, faster = (_of(choice, blocks, around) for choice in (fewer, more))
    assert _seconds(slower[0], around, slower[1]) >= _seconds(faster[0], around, faster[1]) * (1 - GAP)


def mode(name: str, kept_gib: float, seconds: float, moved_gib: float = 0.0) -> BlockProfile:
    return BlockProfile(
        name=name,
        parameters_bytes=0,
        input_bytes=0,
        kept_bytes=int(kept_gib * GIB),
        forward_peak_bytes=2 * GIB,
        backward_peak_bytes=GIB,
        forward_s=seconds,
        backward_s=seconds,
        moved_bytes=int(moved_gib * GIB),
    )


KEEP, AGAIN = mode("keep", 2, 1.0), mode("again", 0.5, 1.5)


def test_the_peak_is_that_of_the_highest_moment() -> None:
    around = MemoryContext(
        budget_bytes=0,
        fixed_bytes=10 * GIB,
        outside=outside(GIB, 3 * GIB),
        gradient_bytes=(GIB, GIB, GIB),
        outside_gradient_bytes=2 * GIB,
    )
    # The first backward pass: two blocks' leavings, its own, what it needs, the rest's, and the head's gradient.
    assert peak_of([KEEP] * 3, around) == (10 + 4 + 2 + 1 + 1 + 2) * GIB
    # With a loss that needs more than a block's backward pass does.
    assert peak_of([KEEP] * 3, replace(around, outside=outside(GIB, 8 * GIB))) == (10 + 6 + 8) * GIB
    # With much between the last two blocks: two blocks' leavings, and the gradients of the third and of the head.
    assert (
        peak_of([KEEP] * 3, replace(around, outside=outside(GIB, 3 * GIB, (0, 18 * GIB))))
        == (10 + 4 + 18 + 1 + 2) * GIB
    )
    # With an optimizer that needs more than any of them.
    assert peak_of([KEEP] * 3, replace(around, step_peak_bytes=20 * GIB)) == (10 + 20) * GIB
    # With a block that passes through more than all the rest.
    wide = replace(KEEP, forward_peak_bytes=30 * GIB)
    assert peak_of([KEEP, KEEP, wide], around) == (10 + 4 + 30) * GIB


@pytest.mark.parametrize(("budget_gib", "kept"), [(19.1, 8), (13.1, 4), (7.1, 0), (7, None)])
def test_as_many_blocks_are_kept_as_there_is_room_for(budget_gib: float, kept: int | None) -> None:
    around = MemoryContext(budget_bytes=int(budget_gib * GIB), fixed_bytes=GIB, outside=outside(0, 2 * GIB + MIB))
    choice = choose_modes([[KEEP, AGAIN]] * 8, around)
    assert (choice.modes.count("keep") if choice else None) == kept


def test_what_the_link_hides_is_moved_rather_than_computed_again() -> None:
    away = mode("away", 0, 1.0, moved_gib=2)
    around = MemoryContext(
        budget_bytes=4 * GIB,
        fixed_bytes=0,
        outside=outside(0, 0),
        host_bytes=64 * GIB,
        link_bytes_per_s=10.0 * GIB,
    )
    assert choose_modes([[KEEP, AGAIN, away]] * 8, around).modes.count("away") >= 6  # type: ignore[union-attr]
    slow = replace(around, link_bytes_per_s=0.1 * GIB)
    assert "away" not in choose_modes([[KEEP, AGAIN, away]] * 6, replace(slow, budget_bytes=6 * GIB)).modes  # type: ignore[union-attr]


def test_states_go_to_the_host_to_the_byte() -> None:
    around = MemoryContext(
        budget_bytes=10 * GIB,
        fixed_bytes=GIB,
        outside=outside(0, 0),
        movable_states_bytes=8 * GIB,
        host_bytes=64 * GIB,
    )
    choice = choose_modes([[KEEP]] * 2, around)
    assert choice is not None
    assert choice.peak_bytes == pytest.approx(10 * GIB, abs=MIB)
    assert choice.unmoved_bytes == pytest.approx(4 * GIB, abs=MIB)
    assert choose_modes([[KEEP]] * 2, replace(around, host_bytes=3 * GIB)) is None


def test_a_model_without_blocks_has_one_choice() -> None:
    around = MemoryContext(budget_bytes=3 * GIB, fixed_bytes=GIB, outside=outside(0, 2 * GIB))
    choice = choose_modes([], around)
    assert choice is not None and choice.modes == () and choice.peak_bytes == 3 * GIB
    assert choose_modes([], replace(around, budget_bytes=2 * GIB)) is None
