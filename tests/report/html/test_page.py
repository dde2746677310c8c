"""The page as text: complete, bounded, nothing to fetch, and no markup but ours."""

import json
import re
from dataclasses import replace

import pytest

from hostile_recordings import hostile_recording
from html_tags import Tags
from support import MIB, Run, climbing_run, training_run
from tonnage.explain import advice_for, advise, diagnose
from tonnage.ledger import Category
from tonnage.recording import Recording
from tonnage.report.html import render_page
from tonnage.report.html.markup import LONGEST_TEXT, clean
from tonnage.units import format_bytes


def sizes(page: str, inside: str) -> list[int]:
    part = re.search(rf'id="{inside}".*?</(?:table|div|section)>', page, re.DOTALL)
    assert part
    return [int(found) for found in re.findall(r'data-bytes="(-?\d+)"', part[0])]


def data_of(page: str) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_the_peaks_are_the_recording_s() -> None:
    recording = training_run(overhead_bytes=500 * MIB, overhead_parts={"context": 400 * MIB, "nccl": 90 * MIB})
    page = render_page(recording)
    assert sizes(page, "peak-allocated") == [recording.peak_allocated_bytes]
    assert sizes(page, "peak-reserved") == [recording.peak_reserved_bytes]
    assert sizes(page, "peak-process") == [recording.peak_process_bytes]
    assert sizes(page, "peak-unused") == [recording.unused_at_peak_bytes]
    ledger = [size for _, size in recording.ledger().ranked()]
    assert sizes(page, "ledger-rows") == [*ledger, recording.peak_allocated_bytes]
    assert sizes(page, "phase-rows") == [phase.peak_allocated_bytes for phase in recording.phases]
    assert sizes(page, "step-rows") == [step.peak_allocated_bytes for step in recording.steps]


def test_the_card_is_filled_by_what_is_listed_and_what_is_free() -> None:
    recording = training_run(overhead_bytes=500 * MIB, overhead_parts={"context": 400 * MIB, "nccl": 90 * MIB})
    page = render_page(recording)
    assert sum(sizes(page, "outside-rows")) == recording.header.capacity_bytes
    assert "outside PyTorch: nccl" in page and "outside PyTorch: other" in page


def test_a_card_that_is_not_known_has_no_free_row() -> None:
    recording = training_run()
    recording.header.capacity_bytes = 0
    assert sum(sizes(render_page(recording), "outside-rows")) == recording.peak_reserved_bytes


def test_a_run_that_died_says_where_and_what_would_save_it() -> None:
    recording = training_run(gpu="t4", batch=64)
    page = render_page(recording, advise(recording))
    assert "does not fit" in page and "Out of memory at" in page
    oom = recording.oom
    assert sizes(page, "oom") == [oom.requested_bytes, oom.free_bytes, oom.reserved_bytes, oom.allocated_bytes]
    assert "What to do" in page and 'id="fixes"' in page


def test_what_follows_the_failure_is_left_out() -> None:
    recording = training_run(gpu="t4", batch=64)
    data = data_of(render_page(recording))
    assert data["failure"]["asked"] == recording.oom.requested_bytes
    assert data["timeline"]["events"] == data["failure"]["event"] + 1
    assert data_of(render_page(training_run()))["failure"] is None


def test_advice_comes_before_the_chart() -> None:
    recording = training_run()
    page = render_page(recording, advise(recording))
    assert page.index('id="fixes"') < page.index('id="chart"')


def test_settings_are_named_beside_pytorch_s_own() -> None:
    page = render_page(training_run(settings="expandable_segments:True"))
    assert "<td>expandable_segments</td><td>True</td><td>False</td>" in page
    assert "PyTorch's defaults" in render_page(training_run())


def test_settings_that_pytorch_would_refuse_are_shown_as_they_are() -> None:
    recording = training_run()
    recording.header.settings = "<b>nonsense"
    assert "PYTORCH_ALLOC_CONF=&lt;b&gt;nonsense" in render_page(recording)


@pytest.mark.parametrize("recording", [Run().recording, Run(outcome="error", error="ValueError: no").recording])
def test_a_run_that_allocated_nothing_has_a_page(recording: Recording) -> None:
    page = render_page(recording)
    assert "Nothing was allocated" in page
    assert recording.header.error in page


def test_nothing_is_fetched() -> None:
    page = render_page(training_run())
    assert not re.search(r"https?:|\bsrc=|href=|url\(|@import|\bfetch\(|XMLHttpRequest|import\(", page)
    assert "default-src 'none'" in page


def test_what_a_recording_says_is_words_and_never_markup() -> None:
    plain, hostile = render_page(training_run()), render_page(hostile_recording())
    known = {tag for tag, _ in Tags(plain).found} | {"details", "summary", "ol", "strong", "code"}
    for tag, attributes in Tags(hostile).found:
        assert tag in known
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "href", "style")]
    assert hostile.count("<script") == hostile.count("</script>") == plain.count("<script")
    assert data_of(hostile)["timeline"]["categories"]


def test_every_field_of_words_is_on_the_hostile_page() -> None:
    """Else the test above would pass by showing nothing."""
    assert render_page(hostile_recording()).count("&lt;img") > 10


def test_half_a_character_does_not_stop_the_page() -> None:
    run = Run()
    run.alloc(MIB, operator="\ud800", module="a\u202eb\x00")
    render_page(run.recording).encode("utf-8")


def test_words_are_bounded_and_visible() -> None:
    assert clean("a" * 10_000).endswith("…") and len(clean("a" * 10_000)) == LONGEST_TEXT
    assert clean("a\u202eb\x00c") == "a\ufffdb\ufffdc"


def test_tables_are_bounded_whatever_the_run() -> None:
    run = Run()
    for number in range(1500):
        run.step(number + 1)
        run.alloc((number % 300 + 1) * 4096, operator=f"op{number}", line=f"file{number}.py:1", module=f"m{number}")
    page = render_page(run.recording)
    assert len(page) < 700_000
    assert "more steps" in page


def test_alike_segments_are_one_row() -> None:
    run = Run()
    for _ in range(30):
        run.alloc(40 * MIB, Category.ACTIVATIONS)
    page = render_page(run.recording)
    assert "× 30" in page and format_bytes(30 * 40 * MIB) in page


def test_a_segment_of_many_pieces_is_drawn_coarsely() -> None:
    run = Run()
    for number in range(1000):
        run.alloc(1024, (Category.ACTIVATIONS, Category.GRADIENTS)[number % 2])
    rows = re.search(r'id="segment-rows".*?</table>', render_page(run.recording), re.DOTALL)[0]
    assert 100 < rows.count("<rect") <= 300


def test_arguments_are_part_of_the_title() -> None:
    recording = training_run()
    recording = replace(recording, header=replace(recording.header, arguments=("--batch", "8 & more")))
    assert "<title>train.py --batch 8 &amp; more</title>" in render_page(recording)


def test_a_run_that_climbs_says_so_on_its_page() -> None:
    recording = climbing_run()
    page = render_page(recording, advice_for(recording))
    assert '<span id="verdict" class="verdict error">fits so far, but climbs</span>' in page
    assert "the steps climb by 64.00 MiB each" in page
    explained = render_page(recording, diagnosis=diagnose(recording))
    assert "fits so far, but climbs" in explained
