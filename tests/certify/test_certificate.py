"""What a program means for a card."""

from dataclasses import replace

from tonnage.allocator import AllocatorSettings
from tonnage.certify.certificate import certify, substituted
from tonnage.certify.program import ProgramPart, RecordedProgram
from tonnage.hardware import find_cuda_gpu

MIB = 2**20
CARD = replace(find_cuda_gpu("h200"), memory_bytes=1000 * MIB)


def training(lengths: list[int], bytes_of: int = 100_000) -> RecordedProgram:
    """Steps that take a batch and a call whose blocks grow with the length."""
    program = RecordedProgram()
    templates = {}
    for length in sorted(set(lengths)):
        template = templates[length] = program.new_template("forward")
        for slot in range(4):
            template.events.extend((0, slot, length * bytes_of, 0))
            template.lines.append("train.py:7")
        for slot in range(4):
            template.events.extend((1, slot, 0, 0))
    for step, length in enumerate(lengths, 1):
        program.begin(ProgramPart("step", step, 1, (8, length)))
        batch = program.take(8 * 8 * length, 0, "train.py:5")
        program.call(templates[length], program.new_instance(), [])
        program.give(batch)
    return program


def test_a_training_that_fits_is_safe_and_names_its_heaviest_step() -> None:
    found = certify(training([100, 400, 1500, 300]), CARD, AllocatorSettings())
    assert found.verdict == "safe" and found.part == ProgramPart("step", 3, 1, (8, 1500))
    assert [part.step for part, *_ in found.heaviest] == [3, 2, 4, 1]
    assert not found.changes


def test_one_long_batch_kills_it_and_a_limit_that_was_lived_through_saves_it() -> None:
    found = certify(training([100, 400, 200, 1500, 300, 2800, 900]), CARD, AllocatorSettings())
    assert found.verdict == "dies" and found.part.step == 6 and found.part.shape == (8, 2800)
    assert found.lived.failure is not None and found.lived.failure.line == "train.py:7"
    limits = [change for change in found.changes if change.words.startswith("max_length")]
    assert [change.words for change in limits] == ["max_length=1500"]
    assert limits[0].lived.failure is None and "1 of 7 batches" in limits[0].cost
    assert max(found.in_all.reserved_bytes) >= 4 * 2800 * 100_000


def test_emptying_the_cache_makes_it_tight() -> None:
    lengths = [500, 1000, 1700, 2000, 2300, 2450]
    found = certify(training(lengths, 99_000), CARD, AllocatorSettings())
    assert found.verdict == "tight" and found.lived.retries > 0
    assert found.program.parts[found.lived.first_retry].kind == "step"


def test_parts_that_do_other_things_are_not_put_in_place_of_each_other() -> None:
    program = training([100, 200])
    program.take(5, 0, "train.py:9")  # the second part does one thing more
    assert substituted(program, lambda number: 1 if number == 2 else None) is None
    assert substituted(training([100, 200]), lambda number: 1 if number == 2 else None) is not None
