import pytest

from tonnage.clock.operators import Work
from tonnage.hardware import find_gpu
from tonnage.report.roofline import fixes_of, roofline_lines, seconds_words
from tonnage.roofline import Analysis, analyse, catalogue_ceilings
from tonnage.roofline.items import GpuTime, Item, RooflineProfile

H200 = catalogue_ceilings(find_gpu("h200"))


def analysis(*items: Item, timeline: GpuTime | None = None) -> Analysis:
    return analyse(RooflineProfile(kind="torch-profiler", source="by hand", items=items, timeline=timeline), H200)


def test_like_advice_for_like_operators_is_one_line() -> None:
    slow = [Item(name="copy_", detail=f"{n}", seconds=1e-3, work=Work(0.0, 2.4e9)) for n in range(3)]
    ((seconds, name, _),) = fixes_of(analysis(*slow))
    assert name == "copy_, 3 kinds" and seconds == pytest.approx(1.5e-3)


def test_what_is_at_its_ceiling_has_nothing_at_stake() -> None:
    assert fixes_of(analysis(Item(name="fill_", seconds=1e-3, work=Work(0.0, 4.9e9)))) == []


@pytest.mark.parametrize(("host_s", "late"), [(0.5, True), (0.01, False)])
def test_a_late_host_is_told(host_s: float, late: bool) -> None:
    line = GpuTime(span_s=1.0, busy_s=1 - host_s, host_s=host_s, queue_s=0.0, launches=5)
    text = "\n".join(
        map(str, roofline_lines(analysis(Item(name="a", seconds=1.0, work=Work(0.0, 4e12)), timeline=line)))
    )
    assert ("the host is late" in text) is late


def test_names_of_any_length_fit() -> None:
    items = [Item(name="x" * 300, detail="y" * 300, seconds=1e-3, calls=10**6, work=Work(1.0, 1.0))]
    assert max(len(str(line)) for line in roofline_lines(analysis(*items))) <= 80


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(2.0, "2.00 s"), (0.0354, "35.4 ms"), (1e-3, "1.00 ms"), (0.000599, "599 µs"), (0.0, "0.00 µs")],
)
def test_times_have_three_digits(seconds: float, words: str) -> None:
    assert seconds_words(seconds) == words
