"""Columns of blocks say what was alive at any moment, and stay bounded."""

import gzip
import json
from base64 import b64decode
from itertools import accumulate

import pytest

from support import MIB, Run, training_run
from tonnage.ledger import Category
from tonnage.report.html import blocks
from tonnage.report.html.blocks import blocks_of, packed_blocks


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
    monkeypatch.setattr(blocks, "MOST_KINDS", 3)
    run = Run()
    for number in range(10):
        run.alloc(MIB, Category.GRADIENTS, operator=f"op{number}")
    found = blocks_of(run.recording.allocations)
    assert len(found["kinds"]) == 4 and found["kind"][3:] == [3] * 7
    assert found["words"][found["groups"][3][0]] == "gradients"


def test_a_stack_without_end_is_cut() -> None:
    run = Run()
    run.alloc(MIB, stack=tuple(f"deep.py:{line}" for line in range(900)))
    assert len(blocks_of(run.recording.allocations)["stacks"][0]) == blocks.FRAMES
