import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import MIB, Run
from tonnage.explain.causes.capacity import holes_at


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
@given(data=st.data())
def test_free_room_is_what_is_reserved_and_not_allocated(settings: str, data: st.DataObject) -> None:
    run = Run(settings=settings)
    live = []
    for size in data.draw(st.lists(st.integers(1, 64 * MIB), max_size=25)):
        live.append(run.alloc(size))
        if len(live) > 2 and data.draw(st.booleans()):
            run.free(live.pop(data.draw(st.integers(0, len(live) - 1))))
        if data.draw(st.integers(0, 9)) == 0:
            run.empty_cache()
    timeline = run.recording.timeline
    moment = data.draw(st.integers(0, len(timeline.allocated_bytes) - 1))
    holes = holes_at(run.recording, moment)
    assert sum(h.free_bytes for h in holes) == timeline.reserved_bytes[moment] - timeline.allocated_bytes[moment]
    assert all(0 < h.largest_bytes <= h.free_bytes for h in holes)


def test_an_empty_segment_is_the_fault_of_the_line_that_it_was_taken_for() -> None:
    run = Run()
    run.free(run.alloc(50 * MIB, line="train.py:7"))
    (hole,) = holes_at(run.recording, 10)
    assert hole.is_empty and hole.free_bytes == hole.largest_bytes == 50 * MIB
    assert [block.line for block in hole.blocks] == ["train.py:7"]
