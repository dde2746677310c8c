from pathlib import Path

import pytest

from tonnage.errors import BadProfile
from tonnage.hardware import find_gpu
from tonnage.roofline import Analysis, Bound, analyse, catalogue_ceilings, read_profile
from tonnage.roofline.analysis import RooflineRow
from tonnage.roofline.readers.torch_trace import read_torch_trace

FILE = Path(__file__).parents[1] / "data" / "step.json.gz"


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    profile = read_profile(FILE)
    return analyse(profile, catalogue_ceilings(find_gpu(profile.gpu)))


def rows(analysis: Analysis, name: str, detail: str = "") -> list[RooflineRow]:
    return [row for row in analysis.rows if row.item.name == name and detail in row.item.detail]


def test_large_products_are_compute_bound(analysis: Analysis) -> None:
    found = rows(analysis, "mm", "50304")
    assert len(found) == 3
    assert all(row.verdict.bound is Bound.COMPUTE and 0.7 < row.verdict.share < 1 for row in found)
    assert all(row.item.work.operations == 2 * 8192 * 1024 * 50304 for row in found)


@pytest.mark.parametrize(
    ("name", "detail"), [("fill_", "8192×50304"), ("add_", "8×1024×1024"), ("gelu", ""), ("_log_softmax", "")]
)
def test_what_moves_bytes_is_memory_bound(analysis: Analysis, name: str, detail: str) -> None:
    assert {row.verdict.bound for row in rows(analysis, name, detail)} == {Bound.MEMORY}


def test_no_kernel_beats_the_card(analysis: Analysis) -> None:
    """Compulsory bytes and operations over measured time: more than a ceiling would be our mistake, or L2's."""
    large = [row for row in analysis.rows if (row.item.work.moved_bytes or 0) / row.item.calls > 2 * 62_914_560]
    assert large
    assert all((row.verdict.share or 0) <= 1 for row in large)


def test_tiny_kernels_are_latency_bound(analysis: Analysis) -> None:
    (scalar,) = rows(analysis, "reciprocal")
    assert (scalar.verdict.bound, scalar.verdict.because) == (Bound.LATENCY, "launch")


def test_shapes_that_were_not_recorded_are_not_guessed(analysis: Analysis) -> None:
    (adam,) = rows(analysis, "_fused_adamw_")
    assert adam.verdict.bound is Bound.UNKNOWN and adam.lost_s == 0
    assert adam.advice == "not judged: its shapes are not in the trace"


def test_copies_from_the_host_are_link_bound(analysis: Analysis) -> None:
    assert {row.verdict.bound for row in rows(analysis, "copy", "HtoD")} == {Bound.LINK}


def test_every_second_on_the_card_is_in_a_row(analysis: Analysis) -> None:
    timeline = analysis.profile.timeline
    assert analysis.seconds == pytest.approx(timeline.busy_s, rel=1e-3)
    assert timeline.busy_s + timeline.host_s + timeline.queue_s == pytest.approx(timeline.span_s)
    assert sum(row.item.launches for row in analysis.rows) == timeline.launches


def event(cat: str, name: str, ts: float, dur: float, **args: object) -> dict[str, object]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def test_kernels_of_the_compiler_carry_their_bytes() -> None:
    launch = {"External id": 7, "kernel_num_gb": 0.5, "kernel_flop": 1000}
    events = [
        event("cpu_op", "triton_poi_fused_add", 0, 5, **launch),
        event("kernel", "triton_poi", 2, 150, **{"External id": 7}),
    ]
    (item,) = read_torch_trace({"traceEvents": events}, "a trace").items
    assert (item.work.moved_bytes, item.work.operations) == (5e8, 1000)


def test_a_kernel_without_an_operator_stands_alone() -> None:
    (item,) = read_torch_trace({"traceEvents": [event("kernel", "void mine<float>(int)", 0, 10)]}, "a trace").items
    assert item.name == "mine" and item.work.moved_bytes is None


def test_a_copy_on_the_card_moves_its_bytes_twice() -> None:
    events = [event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 0, 10, bytes=100)]
    (item,) = read_torch_trace({"traceEvents": events}, "a trace").items
    assert item.work.moved_bytes == 200 and not item.link


def test_events_of_other_kinds_are_left_alone() -> None:
    odd = [
        None,
        {"ph": "X", "cat": [], "name": "x"},
        3,
        {},
        {"ph": "X", "cat": "kernel", "name": 3, "ts": 0, "dur": 1},
        {"ph": "X", "ts": "soon", "name": "x"},
    ]
    kernel = event("kernel", "k", 0, 10, grid=["x"], correlation=None)
    assert len(read_torch_trace({"traceEvents": [*odd, kernel]}, "a trace").items) == 1


@pytest.mark.parametrize("trace", [[], {"traceEvents": 3}, {"traceEvents": []}, {"traceEvents": [{"ph": "X"}]}])
def test_traces_without_kernels(trace: object) -> None:
    with pytest.raises(BadProfile) as caught:
        read_torch_trace(trace, "a trace")
    assert caught.value.hint
