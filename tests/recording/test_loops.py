from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import MIB, Run, training_run
from tonnage.allocator import OutOfMemory
from tonnage.recording.loops import turns


def looped(*lines: tuple[str, ...]) -> Run:
    """Blocks made with these stacks, outermost first."""
    run = Run()
    for stack in lines:
        run.alloc(MIB, line=stack[-1], stack=stack[::-1])
    return run


def test_steps_that_were_marked_are_the_turns() -> None:
    recording = training_run(steps=4)
    marked = [mark.sequence for mark in recording.marks if mark.kind == "step"]
    assert turns(recording) == marked


def test_a_line_that_jumps_back_begins_a_turn() -> None:
    loop = [("run.py:9", "a.py:3"), ("run.py:9", "a.py:5")]
    run = looped(("run.py:9", "a.py:1"), *loop, *loop, *loop)
    born = [a.born for a in run.recording.allocations if a.line == "a.py:3"]
    assert turns(run.recording) == [run.recording.allocations[0].born, *born[1:]]


def test_the_layers_of_a_model_are_no_turns() -> None:
    layers = [("train.py:20", "model.py:7"), ("train.py:20", "model.py:5")] * 8
    run = looped(("train.py:3",), ("train.py:4",), *layers)
    with pytest.raises(OutOfMemory) as caught:
        run.alloc(2**50)
    assert turns(run.dies(caught.value, line="train.py:20")) == []


@given(st.lists(st.sampled_from(["a.py:1", "a.py:2", "b.py:3", "", "odd", "a.py:x"]), max_size=30))
def test_turns_are_in_order_whatever_the_lines_are(lines: list[str]) -> None:
    found = turns(looped(*((line,) for line in lines)).recording)
    assert found == sorted(set(found))


def test_blocks_without_stacks_show_no_turns() -> None:
    recording = training_run(steps=2)
    assert turns(replace(recording, marks=[])) == []


def test_a_loop_further_in_counts_only_where_nothing_waits_for_backward() -> None:
    calls = [("train.py:20", "main.py:7"), ("train.py:20", "main.py:5")] * 8
    inference = looped(("train.py:3",), ("train.py:4",), *calls)
    assert len(turns(inference.recording)) == 9
    training = looped(("train.py:3",), ("train.py:4",), *calls)
    training.phase("backward")
    assert turns(training.recording) == []


@pytest.mark.parametrize(("modules", "count"), [("layers.{}", 0), ("head", 8)])
def test_turns_that_each_call_modules_of_their_own_are_layers(modules: str, count: int) -> None:
    run = looped(("run.py:3",), ("run.py:4",))
    run.phase("forward")
    for turn in range(8):
        for line in ("model.py:5", "model.py:7"):
            run.alloc(MIB, line=line, stack=(line, "run.py:9"), module=modules.format(turn))
    assert len(turns(run.recording)) == count
