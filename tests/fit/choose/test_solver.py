"""The fastest set within the budgets, on profiles made by hand: no device is needed."""

import traceback
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fit.choose.test_placement import HELD
from tonnage.fit.choose.placement import ResidentState
from tonnage.fit.choose.solver import BatchLayout, Solution, block_modes, does_not_fit, layouts, outside_at, solve
from tonnage.fit.survey.profile import BlockProfile, OutsideProfile
from tonnage.fit.survey.survey import BLOCK, BLOCK_OFFLOAD, KEEP, OFFLOAD, SizeProfile
from tonnage.units import GIB, MIB

BLOCKS = 4
EVERYTHING = frozenset({"recompute", "activation-offload", "host-states", "step-in-backward", "micro-batches"})
SMALL = replace(
    HELD,
    parameters_bytes=4 * GIB,
    gradients_bytes=4 * GIB,
    states_bytes=8 * GIB,
    outside_gradients_bytes=GIB,
    block_gradients_bytes=(768 * MIB,) * BLOCKS,
    parameter_gradients_bytes=(GIB,) * 16,
    step_temporary_bytes=0,
    host_step_s=0.5,
)


def size(rows: int) -> SizeProfile:
    """Everything in proportion to the rows."""
    kept = BlockProfile(
        parameters_bytes=768 * MIB,
        input_bytes=rows * 128 * MIB,
        kept_bytes=rows * GIB,
        forward_peak_bytes=rows * (GIB + 256 * MIB),
        backward_peak_bytes=rows * 512 * MIB,
        forward_s=rows * 0.1,
        backward_s=rows * 0.2,
    )
    part = replace(kept, kept_bytes=rows * 640 * MIB, backward_s=rows * 0.25)
    outside = OutsideProfile(
        kept_bytes=rows * 256 * MIB, peak_bytes=rows * GIB, forward_s=rows * 0.05, backward_s=rows * 0.1
    )
    kinds = {f"blocks.{index}": "block" for index in range(BLOCKS)}
    return SizeProfile(rows, kinds, {"block": {KEEP: kept, "part:mlp": part}}, outside)


SIZES = {rows: size(rows) for rows in (1, 2, 4)}


def solutions(budget_gib: float, resident: ResidentState = SMALL, **settings: Any) -> list[Solution]:
    chosen = {"batch_rows": 4, "sliceable": True, "divisible": True, "allowed": EVERYTHING} | settings
    return solve(SIZES, resident, budget_bytes=int(budget_gib * GIB), **chosen)


def test_with_room_for_all_nothing_is_changed() -> None:
    best = solutions(100, allowed=EVERYTHING - {"host-states"})[0]
    assert (best.layout.rows, best.layout.micro_batches) == (4, 1)
    assert best.choice.modes == (KEEP,) * BLOCKS
    assert best.states_on_gpu_bytes == SMALL.states_bytes
    # Four blocks and the rest, four rows each, and the optimizer.
    assert best.step_s == pytest.approx(4 * (4 * 0.3 + 0.15) + SMALL.optimizer_s, rel=0.01)


@pytest.mark.parametrize("budget_gib", [12, 18, 30])
def test_the_fastest_comes_first_and_nothing_that_was_left_out_is_faster(budget_gib: int) -> None:
    found = solutions(budget_gib)
    assert [solution.step_s for solution in found] == sorted(solution.step_s for solution in found)
    for name in EVERYTHING:
        for fewer in solutions(budget_gib, allowed=EVERYTHING - {name}):
            assert fewer.step_s >= found[0].step_s * (1 - 2e-3)
    for slower in (*solutions(budget_gib, sliceable=False), *solutions(budget_gib, divisible=False)):
        assert slower.step_s >= found[0].step_s * (1 - 2e-3)


@settings(max_examples=12)
@given(st.integers(8 * 1024, 48 * 1024))
def test_everything_found_is_within_the_budgets(budget_mib: int) -> None:
    for solution in solutions(budget_mib / 1024):
        assert solution.peak_bytes <= budget_mib * MIB
        moved_states = SMALL.states_bytes - solution.states_on_gpu_bytes
        assert solution.choice.moved_bytes + moved_states <= SMALL.host_bytes


def test_less_budget_is_never_faster() -> None:
    times = [found[0].step_s for budget in (40, 30, 24, 20, 16, 12, 10) if (found := solutions(budget))]
    assert len(times) > 4
    assert all(less >= more * (1 - 2e-3) for more, less in pairwise(times))


def test_what_is_not_allowed_is_not_used() -> None:
    alone = solutions(24, allowed=frozenset(), sliceable=False)
    assert alone
    for solution in alone:
        assert solution.placement.name == "plain"
        assert set(solution.choice.modes) == {KEEP}
        assert not solution.window_bytes
    without = solutions(20, allowed=EVERYTHING - {"recompute"}, sliceable=False)
    assert {mode for solution in without for mode in solution.choice.modes} <= {KEEP, OFFLOAD}


def test_nothing_fits_below_the_parameters() -> None:
    assert solutions(3.9) == []


def test_a_host_without_memory_keeps_states_and_activations_on_the_gpu() -> None:
    found = solutions(30, replace(SMALL, host_bytes=0))
    assert found
    assert {solution.placement.name for solution in found} <= {"plain", "step-in-backward"}
    assert not any(solution.window_bytes for solution in found)


def test_an_offload_that_moves_nothing_is_no_solution_of_its_own() -> None:
    assert all(solution.choice.moved_bytes for solution in solutions(20) if solution.window_bytes)


def test_micro_batches_and_slices_both_divide_the_batch() -> None:
    found = list(layouts(SIZES, 4, sliceable=True, divisible=True))
    assert BatchLayout(rows=1, micro_batches=4) in found
    assert BatchLayout(rows=4, micro_batches=1, slices=4) in found
    assert BatchLayout(rows=4, micro_batches=1) in found
    assert BatchLayout(rows=2, micro_batches=3) in list(layouts(SIZES, 5, sliceable=False, divisible=True))


def test_what_may_not_be_divided_is_one_batch_in_one_piece() -> None:
    smaller = {rows: size for rows, size in SIZES.items() if rows < 4}
    found = list(layouts(smaller, 4, sliceable=False, divisible=False))
    assert {(layout.rows, layout.micro_batches) for layout in found} == {(4, 1)}
    assert found and not any(layout.sliced for layout in found)


def test_nothing_is_scaled_to_a_batch_whose_size_is_known() -> None:
    """What does not grow with the rows, a position bias say, would count twice."""
    assert list(layouts(SIZES, 4, sliceable=False, divisible=False)) == [BatchLayout(rows=4, micro_batches=1)]


def _modes(size: SizeProfile, layout: BatchLayout) -> dict[str, BlockProfile]:
    return {mode.name: mode for mode in block_modes(size, layout, offload=True)[0]}


def test_slices_shrink_what_runs_again_and_nothing_else() -> None:
    whole = _modes(SIZES[4], BatchLayout(rows=4, micro_batches=1))
    sliced = _modes(SIZES[1], BatchLayout(rows=4, micro_batches=1, slices=4))
    assert sliced[KEEP] == whole[KEEP]
    for name in (BLOCK, BLOCK_OFFLOAD):
        assert sliced[name].kept_bytes == whole[name].kept_bytes
        assert sliced[name].moved_bytes == whole[name].moved_bytes
        assert sliced[name].backward_s == pytest.approx(whole[name].backward_s)
        assert sliced[name].forward_peak_bytes < whole[name].forward_peak_bytes
        assert sliced[name].backward_peak_bytes < whole[name].backward_peak_bytes


def test_a_size_in_proportion_is_the_size_itself() -> None:
    in_proportion = _modes(SIZES[1], BatchLayout(rows=4, micro_batches=1, slices=4, sliced=False))
    assert in_proportion == _modes(SIZES[4], BatchLayout(rows=4, micro_batches=1))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8])
def test_the_rest_of_the_model_grows_with_the_batch(rows: int) -> None:
    found, expected = outside_at(SIZES, rows), size(rows).outside
    assert (found.kept_bytes, found.peak_bytes) == (expected.kept_bytes, expected.peak_bytes)
    assert found.backward_s == pytest.approx(expected.backward_s)


def test_the_rest_of_a_batch_that_runs_in_slices_is_what_was_measured_of_it() -> None:
    """A loss in chunks grows no further, and blocks of the whole batch may find no room to be measured."""
    no_more = replace(size(8).outside, kept_bytes=SIZES[4].outside.kept_bytes, peak_bytes=SIZES[4].outside.peak_bytes)
    sliced = {"batch_rows": 8, "divisible": False}
    in_line, known = solutions(20, **sliced)[0], solutions(20, **sliced, outside={8: no_more})[0]
    assert outside_at(SIZES, 8, {8: no_more}) == no_more
    assert (known.step_s, known.peak_bytes) < (in_line.step_s, in_line.peak_bytes)


def test_a_profile_says_what_measuring_it_alone_takes() -> None:
    assert SIZES[2].alone_bytes == 2 * (GIB + GIB + 256 * MIB)


def test_parameters_are_told_apart_from_what_else_is_on_the_card() -> None:
    held = replace(HELD, parameters_bytes=8 * MIB, besides_bytes=61 * MIB)
    error = does_not_fit(held, 40 * MIB, None, 0)
    assert str(error) == (
        "Nothing that keeps the gradients fits 40.00 MiB: parameters take 8.00 MiB, what else is on the card (the sample, "
        "library workspaces) 61.00 MiB, gradients 16.00 GiB, optimizer states 32.00 GiB."
    )
    assert held.held_bytes == 69 * MIB
    assert HELD.held_bytes == 16 * GIB


def test_python_s_traceback_names_the_smallest_budget_and_the_next_card() -> None:
    smallest: Any = SimpleNamespace(
        layout=SimpleNamespace(micro_batches=4, slices=1), placement=SimpleNamespace(name="plain")
    )
    error = does_not_fit(HELD, 40 * MIB, smallest, 60 * GIB)
    words = "".join(traceback.format_exception(error))
    assert "The smallest budget that would do is 60.00 GiB, with 4 micro-batches; the next card that has it is" in words
