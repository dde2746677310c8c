"""What each placement holds on the GPU, and what it costs, with resident made by hand."""

from dataclasses import replace

import pytest

from tonnage.fit.choose.choosing import PIECE_BYTES, MemoryContext, gradients_from, peak_of, staged_bytes
from tonnage.fit.choose.placement import (
    HOST_GRADIENTS,
    HOST_STATES,
    PLACEMENTS,
    PLAIN,
    STEP_IN_BACKWARD,
    WINDOW_BYTES,
    GradientPlace,
    Placement,
    ResidentState,
    suitable,
)
from tonnage.fit.survey.profile import OutsideProfile
from tonnage.units import GIB

ALL = frozenset({"step-in-backward", "host-states"})
HELD = ResidentState(
    parameters_bytes=16 * GIB,
    gradients_bytes=16 * GIB,
    states_bytes=32 * GIB,
    outside_gradients_bytes=2 * GIB,
    block_gradients_bytes=(7 * GIB, 7 * GIB),
    parameter_gradients_bytes=(GIB,) * 16,
    step_temporary_bytes=3 * GIB,
    optimizer_s=0.05,
    clips=False,
    steps_one_by_one=True,
    host_bytes=64 * GIB,
    link_bytes_per_s=32.0 * GIB,
    bandwidth_bytes_per_s=4800.0 * GIB,
    host_step_s=2.0,
)
OUTSIDE = OutsideProfile(kept_bytes=GIB, peak_bytes=4 * GIB, forward_s=0.1, backward_s=0.2)


def around(placement: Placement, held: ResidentState = HELD, micro_batches: int = 1) -> MemoryContext:
    return placement.memory_context(
        held, OUTSIDE, budget_bytes=80 * GIB, micro_batches=micro_batches, backward_s=1.0, extra_bytes=5
    )


def names(held: ResidentState, micro_batches: int, allowed: frozenset[str] = ALL) -> list[str]:
    return [placement.name for placement in suitable(held, micro_batches, allowed)]


def test_every_placement_suits_one_batch_without_clipping() -> None:
    assert names(HELD, 1) == [placement.name for placement in PLACEMENTS]


def test_a_step_inside_backward_sees_neither_the_sum_nor_the_norm_of_gradients() -> None:
    assert "step-in-backward" not in names(HELD, 2)
    assert "step-in-backward" not in names(replace(HELD, clips=True), 1)


@pytest.mark.parametrize(
    "held",
    [replace(HELD, steps_one_by_one=False), replace(HELD, host_bytes=0), replace(HELD, states_bytes=0)],
    ids=["steps all at once", "no host", "no states"],
)
def test_nothing_goes_to_the_host_where_it_cannot(held: ResidentState) -> None:
    assert not {"host-states", "host-gradients"} & set(names(held, 1))


def test_only_what_is_allowed_is_tried() -> None:
    assert names(HELD, 1, frozenset()) == ["plain"]
    assert names(HELD, 1, frozenset({"host-states"})) == ["plain", "host-states", "host-gradients"]


@pytest.mark.parametrize(
    ("placement", "micro_batches", "clips", "expected"),
    [
        (PLAIN, 1, False, GradientPlace.GROW),
        (PLAIN, 2, False, GradientPlace.STAY),
        (STEP_IN_BACKWARD, 1, False, GradientPlace.PASS),
        (HOST_STATES, 1, False, GradientPlace.PASS),
        (HOST_STATES, 1, True, GradientPlace.GROW),
        (HOST_STATES, 2, False, GradientPlace.STAY),
        (HOST_GRADIENTS, 2, True, GradientPlace.PASS),
    ],
)
def test_what_gradients_do(placement: Placement, micro_batches: int, clips: bool, expected: GradientPlace) -> None:
    assert placement.gradients(replace(HELD, clips=clips), micro_batches) is expected


def test_plain_holds_all_and_gradients_grow_until_the_step() -> None:
    frame = around(PLAIN)
    assert frame.fixed_bytes == 48 * GIB + 5
    assert frame.gradient_bytes == HELD.block_gradients_bytes
    assert frame.step_peak_bytes == (16 + 3) * GIB
    assert frame.movable_states_bytes == 0
    assert peak_of([], frame) == (48 + 19) * GIB + 5


def test_with_micro_batches_gradients_are_there_throughout() -> None:
    frame = around(PLAIN, micro_batches=2)
    assert frame.fixed_bytes == (48 + 16) * GIB + 5
    assert frame.gradient_bytes == ()
    assert frame.step_peak_bytes == 3 * GIB


def test_a_step_inside_backward_holds_no_gradients_and_no_temporaries() -> None:
    frame = around(STEP_IN_BACKWARD)
    assert frame.fixed_bytes == 48 * GIB + 5
    assert (frame.gradient_bytes, frame.step_peak_bytes) == ((), 0)


def test_states_that_may_move_are_no_longer_fixed() -> None:
    frame = around(HOST_STATES)
    assert frame.fixed_bytes == 16 * GIB + 5
    assert staged_bytes(frame, 32 * GIB) == 3 * PIECE_BYTES
    assert frame.movable_states_bytes == 32 * GIB
    assert frame.states_s_per_byte * 32 * GIB == pytest.approx(1.0)
    assert frame.states_window_s == 1.0
    assert around(HOST_STATES, replace(HELD, clips=True)).states_window_s == 0.0


def test_gradients_wait_only_for_states_on_the_host_and_where_they_do_not_stay() -> None:
    assert around(HOST_STATES, micro_batches=4).gradient_bytes == ()
    assert gradients_from(around(PLAIN), 2, 0) == [16 * GIB, 9 * GIB, 2 * GIB]
    frame, moved_bytes = around(HOST_STATES), WINDOW_BYTES // 2
    assert gradients_from(frame, 2, 32 * GIB) == [WINDOW_BYTES] * 3
    assert gradients_from(frame, 2, moved_bytes) == [moved_bytes // 2] * 3  # two bytes of states for one of gradients
    few = replace(HELD, outside_gradients_bytes=0, block_gradients_bytes=(WINDOW_BYTES, WINDOW_BYTES // 4))
    assert gradients_from(around(HOST_STATES, few), 2, 32 * GIB) == [WINDOW_BYTES, WINDOW_BYTES // 4, 0]


def test_pieces_on_their_way_are_no_larger_than_what_moved() -> None:
    held = replace(HELD, parameter_gradients_bytes=(15 * GIB, *(GIB // 64,) * 64))
    all_small = 2 * GIB  # states of the last 64, which find no room after the large one
    assert staged_bytes(around(HOST_STATES, held, micro_batches=2), all_small) == 3 * GIB // 32
    assert staged_bytes(around(HOST_STATES, held, micro_batches=2), 3 * GIB) == 3 * PIECE_BYTES
    assert staged_bytes(around(HOST_STATES, held, micro_batches=2), 0) == 0


def test_the_sums_of_gradients_go_with_the_states() -> None:
    assert HOST_GRADIENTS.movable_bytes(HELD, 1) == 32 * GIB
    assert HOST_GRADIENTS.movable_bytes(HELD, 4) == 48 * GIB
    assert HOST_STATES.movable_bytes(HELD, 4) == 32 * GIB
    assert PLAIN.movable_bytes(HELD, 4) == 0


@pytest.mark.parametrize(
    ("placement", "micro_batches", "unmoved_gib", "states_gib"),
    [(PLAIN, 1, 0, 32), (HOST_STATES, 1, 8, 8), (HOST_GRADIENTS, 1, 8, 8), (HOST_GRADIENTS, 2, 24, 16)],
)
def test_of_what_stays_the_states_are_their_share(
    placement: Placement, micro_batches: int, unmoved_gib: int, states_gib: int
) -> None:
    assert placement.states_on_gpu(HELD, micro_batches, unmoved_gib * GIB) == states_gib * GIB


def test_the_host_s_own_step_is_the_longer_of_its_cores_and_the_link() -> None:
    frame = around(HOST_GRADIENTS)
    assert frame.states_s_per_byte * frame.movable_states_bytes == pytest.approx(2.0)
    quick = around(HOST_GRADIENTS, replace(HELD, host_step_s=0.1))
    assert quick.states_s_per_byte * quick.movable_states_bytes == pytest.approx(0.5)


def test_accumulation_is_paid_once_for_each_batch_after_the_first() -> None:
    assert PLAIN.step_overhead_s(HELD, 1, 1.0) == pytest.approx(0.05)
    assert PLAIN.step_overhead_s(HELD, 3, 1.0) == pytest.approx(0.05 + 2 * 3 * 16 / 4800)
    # On the host it hides behind backward, as far as that goes: 1.2 s of cores beside 1 s. It is never cheaper than here.
    assert HOST_GRADIENTS.step_overhead_s(HELD, 3, 1.0) == pytest.approx(0.05 + 2 * 0.2)
    assert HOST_GRADIENTS.step_overhead_s(HELD, 3, 5.0) == PLAIN.step_overhead_s(HELD, 3, 5.0)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda placement: placement.name)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_no_placement_takes_more_than_plain_once_all_states_moved(placement: Placement, micro_batches: int) -> None:
    frame = around(placement, micro_batches=micro_batches)
    assert peak_of([], frame, frame.movable_states_bytes) <= peak_of([], around(PLAIN, micro_batches=micro_batches))


def test_steps_inside_backward_are_launched_one_by_one() -> None:
    held = replace(HELD, stepped_apart=10, launch_s=1e-4, moved_launch_s=3e-4)
    assert PLAIN.launches_s(held) == 0.0
    assert STEP_IN_BACKWARD.launches_s(held) == pytest.approx(10 * 1e-4)
    assert HOST_STATES.launches_s(held) == HOST_GRADIENTS.launches_s(held) == pytest.approx(10 * 3e-4)


def test_a_gradient_on_its_way_to_the_host_is_there_in_backward_alone() -> None:
    held = replace(HELD, block_gradients_bytes=(GIB // 2, 7 * GIB))
    found = around(HOST_GRADIENTS, held)
    assert found.fixed_bytes == held.held_bytes + 5
    assert gradients_from(found, 2, 0) == [new + PIECE_BYTES for new in (GIB, GIB // 2, GIB)], "beside those before it"
