"""Notes of streams and collectives in a captured step: what they hold up, and what they let run side by side."""

from dataclasses import replace

import pytest

from clock.test_step import HALF, PRODUCT, call, step
from tonnage.clock.captured import CapturedCall, CapturedStep
from tonnage.clock.step import busy_s, step_time
from tonnage.clock.streams import LANES
from tonnage.hardware import find_gpu

H200 = find_gpu("h200")
LONG = step_time(step(PRODUCT, times=20), H200).step_s / 20


def note(name: str, *numbers: int) -> CapturedCall:
    return CapturedCall(name=name, kind="stream", values=tuple(map(str, numbers)))


def collective(number: int, *, ranks: int = 8, name: str = "all_reduce") -> CapturedCall:
    return CapturedCall(name=name, kind="collective", values=tuple(map(str, (number, 1 << 20, ranks, 1, 1))))


def seconds(found: CapturedStep, collective_s: float = 0.0) -> float:
    return step_time(found, H200, lambda *_: collective_s).step_s


COPY = replace(
    call("copy_", (1 << 20,), (1 << 20,), ()), devices=("cuda", "pinned"), types=(HALF, HALF, "Scalar"), values=("", "", "True")
)  # fmt: skip


def test_a_copy_on_a_stream_of_its_own_runs_beside_the_rest() -> None:
    products = [PRODUCT] * 20
    beside = step(note("set_stream", 1), COPY, note("set_stream", 0), *products)
    before = step(COPY, *products)
    assert seconds(beside) == pytest.approx(20 * LONG, rel=0.02)
    assert seconds(before) > seconds(beside) + 2e-5
    spans = step_time(beside, H200).timeline.spans
    assert {span.stream for span in spans} == {0, 1}


def test_streams_wait_for_events() -> None:
    ordered = step(PRODUCT, note("record_event", 1, 0), note("wait_event", 1, 1), note("set_stream", 1), PRODUCT,
                   note("record_event", 2, 1), note("wait_event", 2, 0), note("set_stream", 0))  # fmt: skip
    assert seconds(ordered) == pytest.approx(2 * LONG, rel=0.1)


def test_the_host_waits_where_it_is_told_to() -> None:
    free = step(*[PRODUCT] * 20, call("add", (16, 16), (16, 16)))
    for last in (note("synchronize"), note("synchronize_stream", 0), note("record_event", 1, 0)):
        extra = [note("synchronize_event", 1)] if last.name == "record_event" else []
        waiting = step(*[PRODUCT] * 20, last, *extra, call("add", (16, 16), (16, 16)))
        assert seconds(waiting) > seconds(free)


def test_a_collective_hides_behind_what_does_not_wait_for_it() -> None:
    products = [PRODUCT] * 20
    hidden = step(PRODUCT, collective(1), *products, note("wait_collective", 1), PRODUCT)
    exposed = step(PRODUCT, collective(1), note("wait_collective", 1), *products, PRODUCT)
    assert seconds(hidden, 10 * LONG) == pytest.approx(22 * LONG, rel=0.02)
    assert seconds(exposed, 10 * LONG) == pytest.approx(32 * LONG, rel=0.02)
    lanes = {span.stream for span in step_time(hidden, H200, lambda *_: 1e-3).timeline.spans}
    assert lanes == {0, LANES + 1}


def test_a_collective_begins_when_what_was_launched_before_it_is_done() -> None:
    waited = step(*[PRODUCT] * 5, collective(1), note("wait_collective", 1))
    spans = step_time(waited, H200, lambda *_: 1e-3).timeline.spans
    (sent,) = [span for span in spans if span.kind == "collective"]
    assert sent.start_s >= max(span.end_s for span in spans if span.kind == "matmul")


def test_futures_are_waited_for_when_backward_is_over() -> None:
    backward = [collective(1), note("future_collective", 1), *[PRODUCT] * 10]
    found = step(*backward, PRODUCT)
    found = replace(found, threads=(1,) * len(backward) + (0,))
    assert seconds(found, 20 * LONG) == pytest.approx(21 * LONG, rel=0.05)
    assert seconds(found, 5 * LONG) == pytest.approx(11 * LONG, rel=0.05)


def test_alone_or_where_nobody_knows_the_links_collectives_take_no_time() -> None:
    assert seconds(step(PRODUCT, collective(1, ranks=1)), 1.0) < 1e-2
    assert step_time(step(PRODUCT, collective(1)), H200).step_s < 1e-2


def test_what_a_function_takes_of_card_and_host_apart() -> None:
    card_s, host_s = busy_s(step(PRODUCT, call("_local_scalar_dense", ()), times=10), H200)
    assert card_s == pytest.approx(10 * LONG, rel=0.05)
    assert 0 < host_s < card_s
