"""The native replay and the Python one agree, whatever the program and the settings."""

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.allocator import AllocatorSettings
from tonnage.certify.program import ProgramPart, RecordedProgram
from tonnage.certify.replay import in_python, live_through, native_library

MIB = 2**20
CHOICES = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:64",
    "garbage_collection_threshold:0.6",
    "roundup_power2_divisions:4",
)


def random_program(seed: int, parts: int = 6, cap: int = -1) -> RecordedProgram:
    """Blocks of the script's, calls that leave some of theirs, drops in any order, emptied caches."""
    draw = random.Random(seed)
    program = RecordedProgram()
    program.operations.extend((6, 100 * MIB, 7, cap))
    own, left = [], []
    for part in range(parts):
        template = program.new_template(f"call {part}")
        alive = []
        for _ in range(draw.randint(1, 60)):
            if alive and draw.random() < 0.4:
                slot = alive.pop(draw.randrange(len(alive)))
                template.events.extend((1, slot, 0, 0))
            else:
                template.events.extend(
                    (
                        0,
                        template.slots,
                        draw.choice((1, 700, 30_000, 2 * MIB, 9 * MIB, 25 * MIB)) * draw.randint(1, 4),
                        draw.choice((0, 0, 0, 7)),
                    )
                )
                alive.append(template.slots)
                template.lines.append("train.py:1")
        for _ in range(draw.randint(1, 3)):
            program.begin(ProgramPart("step", part + 1))
            instance = program.new_instance()
            program.call(template, instance, [])
            left += [(instance, slot) for slot in alive]
            for _ in range(draw.randint(0, 8)):
                own.append(program.take(draw.randint(1, 40 * MIB), 0, "train.py:2"))
            for held in (own, left):
                draw.shuffle(held)
                for _ in range(draw.randint(0, len(held))):
                    program.give(held.pop())
            if draw.random() < 0.1:
                program.operations.append(5)
    return program


@pytest.mark.parametrize("choice", CHOICES)
@given(seed=st.integers(0, 10**6), room=st.sampled_from((400, 900, 100_000)), capped=st.booleans())
@settings(max_examples=25)
def test_both_live_alike(choice: str, seed: int, room: int, capped: bool) -> None:
    program = random_program(seed, cap=300 * MIB if capped else -1)
    chosen = AllocatorSettings.parse(choice, (2, 11))
    assert native_library() is not None, "this test needs a C compiler"
    assert live_through(program, room * MIB, chosen) == in_python(program, room * MIB, chosen)


def test_a_block_that_nobody_holds_is_counted_and_no_harm() -> None:
    program = RecordedProgram(operations=array("q", [1, 5, 3, 2, 0]))
    lived = live_through(program, 100 * MIB, AllocatorSettings())
    assert lived.failure is None and lived.unknown_frees == 2
    assert in_python(program, 100 * MIB, AllocatorSettings()) == lived


def test_a_failure_names_its_part_and_line() -> None:
    program = RecordedProgram()
    program.begin(ProgramPart("step", 1))
    program.take(30 * MIB, 0, "train.py:3")
    program.begin(ProgramPart("step", 2))
    program.take(90 * MIB, 0, "train.py:9")
    failure = live_through(program, 100 * MIB, AllocatorSettings()).failure
    assert failure is not None and (failure.part, failure.line) == (2, "train.py:9")
    assert failure.requested_bytes == 90 * MIB and failure.allocated_bytes == 30 * MIB
