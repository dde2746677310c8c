"""Launches on their streams, behind the host that launches them."""

from hypothesis import example, given
from hypothesis import strategies as st
from pytest import approx

from tonnage.clock.timeline import EVERYTHING, KERNEL_GAP_S, Task, steady_s, timeline

_TASKS = st.lists(
    st.builds(
        Task,
        name=st.just("kernel"),
        kind=st.sampled_from(("matmul", "elementwise")),
        seconds=st.floats(0.0, 1e-3),
        host_s=st.floats(0.0, 1e-4),
        stream=st.integers(0, 2),
        synchronizes=st.booleans(),
    ),
    min_size=1,
    max_size=30,
)


def kernel(seconds: float, host_s: float = 1e-6, **settings: object) -> Task:
    return Task("kernel", "matmul", seconds, host_s, **settings)  # type: ignore[arg-type]


def test_long_kernels_hide_the_host() -> None:
    found = timeline([kernel(1e-3) for _ in range(10)])
    assert found.step_s == approx(10 * (1e-3 + KERNEL_GAP_S), rel=1e-3)
    assert found.idle_s < 1e-4
    assert found.by_kind == {"matmul": approx(1e-2)}


def test_short_kernels_wait_for_the_host() -> None:
    found = timeline([kernel(2e-6, host_s=3e-5) for _ in range(100)])
    assert found.step_s == approx(3e-3, rel=1e-2)
    assert found.idle_s == approx(found.step_s - 100 * 2e-6, rel=1e-2)


def test_the_first_of_many_kernels_runs_while_the_others_are_launched() -> None:
    many = Task("lstm", "recurrent", 1e-3, 1.2e-3, kernels=100, launching_s=1.1e-3)
    at_once = Task("lstm", "recurrent", 1e-3, 1.2e-3, kernels=100)
    wait = Task("item", "copy", synchronizes=True)
    assert timeline([many, wait]).step_s < 1.3e-3 < 2.1e-3 < timeline([at_once, wait]).step_s


def test_a_wait_for_the_card_lets_nothing_be_launched_ahead() -> None:
    ahead = [kernel(1e-3, host_s=5e-4)]
    waiting = [Task("item", "host", synchronizes=True), *ahead]
    assert timeline(waiting).step_s > timeline(ahead).step_s + 4e-4


def test_streams_overlap_unless_one_awaits_the_other() -> None:
    apart = [kernel(1e-3), kernel(1e-3, stream=1)]
    assert timeline(apart).step_s == approx(1e-3, rel=0.02)
    after = [
        kernel(1e-3, records="first"),
        kernel(1e-3, stream=1, awaits=("first",), records="second"),
        kernel(1e-6, awaits=("second",)),
    ]
    assert timeline(after).step_s == approx(2e-3, rel=0.02)


def test_an_event_is_of_what_was_launched_before_it() -> None:
    later = [kernel(1e-3, records="first"), kernel(2e-3), kernel(1e-3, stream=1, awaits=("first",))]
    assert timeline(later, warm_steps=0).step_s == approx(3e-3, rel=0.02)


def test_an_event_that_comes_later_is_that_of_the_step_before() -> None:
    copied = [kernel(1e-4, awaits=("copied",)), kernel(1e-3), kernel(5e-4, stream=1, records="copied")]
    assert timeline(copied).step_s == approx(1.1e-3, rel=0.05)


def test_the_host_waits_for_one_stream_or_for_all() -> None:
    launched = [kernel(1e-3, stream=1), kernel(1e-4)]
    one = timeline([*launched, Task("item", "host", synchronizes=True), Task("", "host", host_s=1e-3)])
    every = timeline([*launched, Task("", "host", stream=EVERYTHING, synchronizes=True), Task("", "host", host_s=1e-3)])
    assert one.step_s == approx(1.1e-3, rel=0.1)
    assert every.step_s == approx(2e-3, rel=0.1)


@given(_TASKS)
@example([kernel(7.757e-4, 0.0, stream=1), kernel(8.675e-4, 2.3e-5), kernel(1e-4, 0.0, stream=1)])
def test_a_step_takes_at_least_what_its_busiest_lane_takes(tasks: list[Task]) -> None:
    found = timeline(tasks)
    busiest_s = max(sum(task.seconds for task in tasks if task.stream == stream) for stream in range(3))
    assert found.step_s >= max(busiest_s, found.host_s) - 1e-9
    assert 0 <= found.idle_s <= found.step_s
    assert sum(found.by_kind.values()) >= sum(task.seconds for task in tasks) - 1e-9


def test_what_a_stream_did_ahead_of_the_others_is_shown_within_the_step() -> None:
    found = timeline([kernel(1e-4, stream=1), *[kernel(1e-3) for _ in range(10)]])
    assert found.step_s == approx(1e-2, rel=0.02)
    assert {span.stream for span in found.spans} == {0, 1}
    assert all(0 <= span.start_s < span.end_s <= found.step_s * 1.001 for span in found.spans)


def test_a_slower_card_or_host_without_making_tasks_anew() -> None:
    tasks = [kernel(1e-4, host_s=1e-5) for _ in range(50)]
    assert steady_s(tasks, 1.0, 1.0) == approx(timeline(tasks).step_s, rel=1e-6)
    assert steady_s(tasks, 2.0, 1.0) == approx(2 * steady_s(tasks, 1.0, 1.0), rel=0.02)
    assert steady_s(tasks, 1.0, 20.0) == approx(50 * 2e-4, rel=0.02)
