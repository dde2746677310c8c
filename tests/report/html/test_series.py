"""What is kept of a timeline: nothing is lost of a short run, and no maximum of a long one."""

import gzip
import json
from base64 import b64decode
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import MIB, Run, training_run
from tonnage.ledger import Category
from tonnage.recording import Recording
from tonnage.report.html import series
from tonnage.report.html.series import STACKING, blocks_of, differences, packed_blocks, series_of

CATEGORIES = (Category.PARAMETERS, Category.ACTIVATIONS, Category.WORKSPACE)
moves = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40), st.booleans()), min_size=1, max_size=60)


def recorded(moves: list[tuple[int, int, bool]]) -> Recording:
    run, live = Run(), []
    for kind, size, frees in moves:
        live.append(run.alloc(size * MIB, CATEGORIES[kind]))
        if frees:
            run.free(live.pop(len(live) // 2))
    return run.recording


def levels(found: dict) -> dict[str, list[int]]:
    return {entry["key"]: list(accumulate(entry["levels"])) for entry in found["categories"]}


def level_at(recording: Recording, category: Category, event: int) -> int:
    alive = (a for a in recording.allocations if a.born <= event and (a.died is None or a.died > event))
    return sum(a.block_bytes for a in alive if a.category is category)


def test_a_short_run_is_there_event_by_event() -> None:
    recording = training_run()
    found = series_of(recording)
    stacked = [sum(column) for column in zip(*levels(found).values(), strict=True)]
    assert found["whole"] and found["events"] == len(recording.timeline.allocated_bytes)
    assert stacked == recording.timeline.allocated_bytes
    assert list(accumulate(found["reserved"])) == recording.timeline.reserved_bytes
    assert stacked[found["peak"]] == recording.peak_allocated_bytes


@given(moves)
def test_no_maximum_of_a_long_run_is_lost(moves: list[tuple[int, int, bool]]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(series, "WHOLE_UP_TO_TIMES", 1)
        recording = recorded(moves)
        found = series_of(recording, stretches=5)
    points = list(accumulate(found["points"]))
    length = found["events"]
    assert points == sorted(set(points)) and len(points) <= 5 * (4 + len(CATEGORIES)) + 2
    for category in {a.category for a in recording.allocations}:
        kept = dict(zip(points, levels(found)[category], strict=True))
        assert all(level == level_at(recording, category, event) for event, level in kept.items())
        assert max(kept.values()) == max(level_at(recording, category, event) for event in range(length))
    for stretch in range(5):
        within = range(stretch * length // 5, (stretch + 1) * length // 5)
        kept = [p for p in points if p in within]
        for truth in (recording.timeline.allocated_bytes, recording.timeline.reserved_bytes):
            assert not within or max(truth[p] for p in kept) == max(truth[p] for p in within)
    assert recording.timeline.peak_sequence in points


def test_marks_are_named_stretches() -> None:
    found = series_of(training_run(steps=2))
    assert [name for _, _, name in found["steps"]] == ["1", "2"]
    assert [name for _, _, name in found["phases"]] == ["forward", "backward", "optimizer"] * 2


def test_too_many_marks_leave_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    every = series_of(training_run(steps=2))["phases"]
    monkeypatch.setattr(series, "MOST_SPANS", 2)
    kept = series_of(training_run(steps=2))["phases"]
    assert kept == sorted(sorted(every, key=lambda span: span[0] - span[1])[:2])


def test_every_category_has_its_place_in_the_stack() -> None:
    assert set(STACKING) == set(Category)


def test_differences_of_nothing() -> None:
    assert differences([]) == []
    assert differences([5, 7, 4]) == [5, 2, -3]


def test_a_run_without_events() -> None:
    found = series_of(Run().recording)
    assert found["categories"] == [] and found["points"] == [0]


def test_the_columns_give_every_moment_back() -> None:
    recording = training_run(steps=3)
    packed = json.loads(gzip.decompress(b64decode(packed_blocks(recording))))
    born = list(accumulate(packed["born"]))
    ends = [at + life if life else float("inf") for at, life in zip(born, packed["life"], strict=True)]
    for event, level in enumerate(recording.timeline.allocated_bytes):
        alive = (size for start, end, size in zip(born, ends, packed["bytes"], strict=True) if start <= event < end)
        assert sum(alive) == level
    held_at, held = (list(accumulate(packed[key])) for key in ("held_at", "held"))
    levels = dict(zip(held_at, held, strict=True))
    level = 0
    for event, expected in enumerate(recording.timeline.reserved_bytes):
        level = levels.get(event, level)
        assert level == expected


def test_layers_share_a_group_and_keep_their_names_and_stacks() -> None:
    run = Run()
    for layer in range(3):
        run.alloc(MIB, operator="aten::mm", module=f"layers.{layer}", stack=("lib/a.py:1", "t.py:2"), line="t.py:2")
    found = blocks_of(run.recording.allocations)
    words = found["words"]
    assert [words[number] for number in found["groups"][0]] == ["other", "mm", "layers.*", "t.py:2", "lib/a.py:1", ""]
    assert [words[module] for _, module, _ in found["kinds"]] == ["layers.0", "layers.1", "layers.2"]
    assert [words[number] for number in found["stacks"][0]] == ["lib/a.py:1", "t.py:2"]
    assert len(found["groups"]) == len(found["stacks"]) == 1


def test_tensors_of_no_known_shape_are_alike_where_their_size_is() -> None:
    run = Run()
    for size in (MIB, 2 * MIB, MIB):
        run.alloc(size, Category.ACTIVATIONS)
    assert len(blocks_of(run.recording.allocations)["groups"]) == 2


def test_the_smallest_are_left_out_and_counted() -> None:
    run = Run()
    for number in range(20):
        run.alloc((number + 1) * MIB)
    found = blocks_of(run.recording.allocations, most=5)
    assert found["left_out"] == 15 and min(found["bytes"]) == 16 * MIB


def test_kinds_beyond_the_last_keep_their_category(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "MOST_KINDS", 3)
    run = Run()
    for number in range(10):
        run.alloc(MIB, Category.GRADIENTS, operator=f"op{number}")
    found = blocks_of(run.recording.allocations)
    assert len(found["kinds"]) == 4 and found["kind"][3:] == [3] * 7
    assert found["words"][found["groups"][3][0]] == "gradients"


def test_a_stack_without_end_is_cut() -> None:
    run = Run()
    run.alloc(MIB, stack=tuple(f"deep.py:{line}" for line in range(900)))
    assert len(blocks_of(run.recording.allocations)["stacks"][0]) == series.FRAMES
