"""The rows of an summary, from surveys made by hand: words follow numbers, and numbers the largest size measured."""

from dataclasses import replace

import pytest

from fit.choose.test_solver import BLOCKS, SMALL, size, solutions
from fit.test_plan import make_plan
from tonnage.fit.choose.solver import BatchLayout
from tonnage.fit.choose.summary import is_telling, plain_cost, summary, summary_rows
from tonnage.fit.plan import TechniqueRow
from tonnage.fit.prove.rehearsal import Rehearsed
from tonnage.fit.survey.survey import KEEP, SizeProfile, Survey
from tonnage.fit.technique import Technique
from tonnage.fit.techniques.chunked_loss import ChunkedLoss
from tonnage.fit.techniques.compile import Compile
from tonnage.fit.techniques.recompute import Recompute
from tonnage.units import GIB, MIB, format_bytes

ROWS = 4


def survey(*sizes: SizeProfile, rows: int = ROWS) -> Survey:
    """As it stands after these sizes were measured."""
    made = object.__new__(Survey)
    made.rows, made.sizes, made.supposed = rows, {one.rows: one for one in sizes}, set()
    return made


def changed(plain: SizeProfile, *, time: float = 1.0, memory: float = 1.0) -> SizeProfile:
    kept = plain.blocks["block"][KEEP]
    block = replace(
        kept,
        kept_bytes=round(kept.kept_bytes * memory),
        forward_peak_bytes=round(kept.forward_peak_bytes * memory),
        backward_peak_bytes=round(kept.backward_peak_bytes * memory),
        forward_s=kept.forward_s * time,
        backward_s=kept.backward_s * time,
    )
    return replace(plain, blocks={"block": {KEEP: block}})


def rows_of(*stages: Survey, techniques: tuple[Technique, ...] = (ChunkedLoss(),)) -> tuple[TechniqueRow, ...]:
    names = ["plain", *(technique.name for technique in techniques)]
    solution = solutions(100, allowed=frozenset())[0]
    return summary_rows(list(zip(names, stages, strict=True)), SMALL, solution, techniques)


# One row takes four times its share of the time, as where a card is idle between launches.
SLOW_ALONE = changed(size(1), time=4.0)


def test_the_plain_step_is_that_of_the_largest_size_measured() -> None:
    whole = plain_cost(survey(size(4)), SMALL)
    assert plain_cost(survey(SLOW_ALONE, size(2), size(4)), SMALL) == whole
    assert plain_cost(survey(SLOW_ALONE, size(2)), SMALL)[1] == pytest.approx(whole[1])
    assert plain_cost(survey(SLOW_ALONE), SMALL)[1] > 3 * whole[1]


def test_what_takes_the_same_bytes_at_every_size_counts_once() -> None:
    def with_fixed(rows: int) -> SizeProfile:
        plain = size(rows)
        block = plain.blocks["block"][KEEP]
        return replace(plain, blocks={"block": {KEEP: replace(block, kept_bytes=block.kept_bytes + GIB)}})

    whole = plain_cost(survey(with_fixed(ROWS)), SMALL)[0]
    assert plain_cost(survey(with_fixed(1), with_fixed(2)), SMALL)[0] == whole
    assert plain_cost(survey(with_fixed(2)), SMALL)[0] > whole


def test_one_row_says_nothing_of_how_long_many_take() -> None:
    assert is_telling(survey(size(1)))
    assert not is_telling(survey(size(1), rows=256))
    assert is_telling(survey(size(1), size(64), rows=256))


def test_a_size_that_does_not_divide_the_batch_is_in_exact_proportion() -> None:
    three, whole = plain_cost(survey(size(1), size(3)), SMALL), plain_cost(survey(size(4)), SMALL)
    assert three[1] == pytest.approx(whole[1])
    assert three[0] == pytest.approx(whole[0], abs=BLOCKS)


def test_stages_are_compared_at_the_largest_size_that_both_have() -> None:
    plain = survey(SLOW_ALONE, size(2))
    faster = survey(changed(size(1), time=0.5), changed(size(2), time=0.5), size(4))
    row = rows_of(plain, faster)[0]
    assert row.seconds == pytest.approx(-0.5 * ROWS * BLOCKS * 0.3)
    assert row.why.endswith("; measured on 2 of 4 rows, in proportion for the rest")


def test_stages_without_a_common_size_are_compared_at_their_own() -> None:
    row = rows_of(survey(size(2)), survey(changed(size(4), time=0.5)))[0]
    assert row.seconds == pytest.approx(-0.5 * ROWS * BLOCKS * 0.3)


@pytest.mark.parametrize(
    ("time", "memory", "words"),
    [
        (0.5, 0.5, "pays: it saves {size} and {time}"),
        (1.0, 0.5, "pays: it saves {size}"),
        (0.5, 1.0, "pays: it saves {time}"),
        (1.5, 0.5, "kept: it saves {size} and costs {time}"),
        (0.5, 1.5, "kept: it saves {time} and costs {size}"),
        (1.5, 1.5, "kept, though it costs {size} and {time} here: without=['chunked-loss'] leaves it out"),
        (1.0, 1.0, "makes no difference here"),
        (1.00001, 1.0, "makes no difference here"),
    ],
)
def test_words_follow_the_numbers(time: float, memory: float, words: str) -> None:
    row = rows_of(survey(size(4)), survey(changed(size(4), time=time, memory=memory)))[0]
    told = words.format(size=format_bytes(abs(row.saved_bytes)), time="2.40 s")
    assert row.why == f"{told}; measured on the whole batch"
    assert (row.saved_bytes > 0, row.saved_bytes < 0) == (memory < 1, memory > 1)


def test_each_stage_has_a_row_against_the_one_before() -> None:
    stages = survey(size(4)), survey(changed(size(4), memory=0.5)), survey(changed(size(4), memory=0.5, time=0.5))
    first, second = rows_of(*stages, techniques=(ChunkedLoss(), Compile()))
    assert (first.name, second.name) == ("chunked-loss", "compile")
    assert first.saved_bytes > GIB and first.seconds == 0
    assert abs(second.saved_bytes) < MIB and second.seconds < -1


def test_slices_of_a_batch_need_not_be_even() -> None:
    measured = survey(size(1), size(22), rows=90)
    found = solutions(100, allowed=frozenset())[0]
    found = replace(found, layout=BatchLayout(rows=90, micro_batches=1, slices=5))
    technique = Recompute(modes={f"blocks.{index}": "block" for index in range(BLOCKS)}, slices=5)
    rows = summary_rows([("plain", measured)], SMALL, found, (technique,))
    assert [row.name for row in rows] == ["recompute"]


# In words, at home in 80 columns.
ROW = TechniqueRow(
    name="recompute",
    title="recompute in backward",
    saved_bytes=30 * GIB,
    seconds=0.798,
    why="the fastest choice of modes within the budget: 28 block+offload, 3 part:mlp, 1 keep, and words that go on",
)
PLAN = replace(
    make_plan(), budget_bytes=40 * GIB, plain_peak_bytes=70 * GIB, peak_bytes=39 * GIB, step_s=3.2, rows=(ROW,)
)


def measured(reserved_bytes: int) -> Rehearsed:
    return Rehearsed(peak_allocated_bytes=reserved_bytes, peak_reserved_bytes=reserved_bytes, stepped=True)


def test_it_tells_before_each_technique_and_after() -> None:
    lines = summary(PLAN, measured(39 * GIB)).splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("plain") and "70.00 GiB" in line for line in lines)
    assert any("recompute in backward" in line and "−30.00 GiB" in line and "+798 ms" in line for line in lines)
    assert any(line.startswith("fitted, predicted") and "39.00 GiB" in line and "3.20 s" in line for line in lines)
    assert any(line.startswith("fitted, measured") and "39.00 GiB" in line for line in lines)


def test_a_plain_training_that_could_not_be_measured_has_no_number() -> None:
    words = summary(replace(PLAN, plain_peak_bytes=0), None)
    assert max(map(len, words.splitlines())) <= 80
    assert "does not fit" in words
    assert "0 B" not in words


def test_a_time_that_rounds_to_nothing_has_no_sign() -> None:
    words = summary(replace(PLAN, rows=(replace(ROW, seconds=-0.0001), replace(ROW, seconds=0.0001))), None)
    assert "−0 ms" not in words and "+0 ms" not in words and words.count(" 0 ms") == 2


def test_words_are_broken_at_spaces_alone_and_fill_their_lines() -> None:
    why = f"pays: it saves 2.44 GiB and 12 ms; measured on {'x' * 26}-{'y' * 18} in proportion for the rest"
    lines = summary(replace(PLAN, rows=(replace(ROW, why=why),)), None).splitlines()
    assert [line.split()[-1] for line in lines if line.startswith("      ") and "peak" not in line] == ["on", "rest"]
