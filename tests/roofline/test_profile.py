import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.roofline.profile import Activity, timeline_of


def test_nothing_ran() -> None:
    assert timeline_of([]) is None


def test_a_gap_is_the_host_s_until_the_launch() -> None:
    line = timeline_of([Activity(0.0, 1.0, -0.1), Activity(4.0, 5.0, 3.0)])
    assert (line.span_s, line.busy_s, line.host_s, line.queue_s) == (5.0, 2.0, 2.0, 1.0)


def test_a_kernel_that_waited_in_the_queue_waited_for_nobody() -> None:
    line = timeline_of([Activity(0.0, 1.0, 0.0), Activity(1.5, 2.0, 0.5)])
    assert (line.host_s, line.queue_s) == (0.0, 0.5)


def test_streams_that_overlap_are_busy_once() -> None:
    line = timeline_of([Activity(0.0, 4.0), Activity(1.0, 2.0), Activity(3.0, 6.0)])
    assert (line.busy_s, line.span_s, line.launches) == (6.0, 6.0, 3)


activities = st.builds(
    lambda start, length, lead: Activity(start, start + length, start - lead),
    st.floats(0, 100),
    st.floats(0, 10),
    st.floats(0, 5),
)


@given(st.lists(activities, min_size=1))
def test_busy_and_idle_make_the_span(ran: list[Activity]) -> None:
    line = timeline_of(ran)
    assert line.busy_s + line.host_s + line.queue_s == pytest.approx(line.span_s, abs=1e-6)
    assert min(line.busy_s, line.host_s, line.queue_s) >= 0
