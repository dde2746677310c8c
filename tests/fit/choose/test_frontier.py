"""The integer program against every possible choice, on small graphs of operators."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.fit.choose.frontier import frontier, needed
from tonnage.fit.survey.profile import OperatorProfile


def operator(index: int, **settings: object) -> OperatorProfile:
    fields = {"name": f"aten.op{index}.default", "output_bytes": 8, "kept_bytes": 0, "seconds": 1.0}
    return OperatorProfile(index=index, **(fields | settings))  # type: ignore[arg-type]


@st.composite
def graphs(draw: st.DrawFn) -> list[OperatorProfile]:
    operators: list[OperatorProfile] = []
    for index in range(draw(st.integers(1, 7))):
        roots = [o.index for o in operators if o.output_bytes]
        inputs = tuple(sorted(draw(st.sets(st.sampled_from(roots), max_size=3)))) if roots else ()
        is_view = bool(inputs) and draw(st.integers(0, 4)) == 0
        size = 0 if is_view else draw(st.integers(1, 100))
        operators.append(
            operator(
                index,
                output_bytes=size,
                kept_bytes=size if draw(st.booleans()) else 0,
                seconds=0.0 if is_view else float(draw(st.integers(1, 50))),
                inputs=inputs[:1] if is_view else inputs,
                base=inputs[0] if is_view else None,
            )
        )
    return operators


def _best_s(operators: list[OperatorProfile], limit_bytes: int) -> float:
    """By trying all."""
    roots = [o for o in operators if o.output_bytes]
    sets = (kept for count in range(len(roots) + 1) for kept in combinations(roots, count))
    return min(
        sum(operators[index].seconds for index in needed(operators, {o.index for o in kept}))
        for kept in sets
        if sum(o.output_bytes for o in kept) <= limit_bytes
    )


@settings(max_examples=40)
@given(graphs())
def test_no_choice_of_as_many_bytes_is_faster(operators: list[OperatorProfile]) -> None:
    for choice in frontier(operators, 0, levels=5):
        assert choice.seconds == pytest.approx(_best_s(operators, choice.kept_bytes), rel=1e-3)


@settings(max_examples=40)
@given(graphs(), st.integers(0, 1000))
def test_more_bytes_take_less_time_from_nothing_kept_to_nothing_again(
    operators: list[OperatorProfile], input_bytes: int
) -> None:
    choices = frontier(operators, input_bytes)
    assert choices[0].kept_bytes == input_bytes
    assert choices[-1].seconds == 0
    for fewer, more in pairwise(choices):
        assert fewer.kept_bytes < more.kept_bytes and fewer.seconds > more.seconds


@settings(max_examples=100)
@given(graphs(), st.data())
def test_what_runs_again_finds_its_inputs_kept_or_run_again(
    operators: list[OperatorProfile], data: st.DataObject
) -> None:
    roots = {o.index for o in operators if o.output_bytes}
    kept = data.draw(st.sets(st.sampled_from(sorted(roots)))) if roots else set()
    again = needed(operators, kept)
    read = {o.index for o in operators if o.kept_bytes} & roots
    assert read <= again | kept
    assert not again & kept
    for index in again:
        assert set(operators[index].inputs) <= again | kept


def test_what_writes_into_a_storage_runs_again_with_it() -> None:
    empty = operator(0, kept_bytes=8)
    noise = operator(1, output_bytes=0, inputs=(0,), base=0, writes=True, keepable=False)
    assert needed([empty, noise], set()) == {0, 1}
    assert needed([empty, noise], {0}) == frozenset()


def test_what_cannot_run_again_is_always_kept() -> None:
    gathered = operator(0, kept_bytes=0, repeatable=False)
    product = operator(1, kept_bytes=8, inputs=(0,))
    choices = frontier([gathered, product], 10)
    assert all(0 in choice.kept for choice in choices)
    assert choices[0].kept_bytes == 10 + 8


def test_what_changes_after_it_was_read_is_never_kept() -> None:
    changing = operator(0, kept_bytes=8, keepable=False)
    assert all(choice.kept == () for choice in frontier([changing], 0))


def test_a_mode_names_the_operators() -> None:
    (_, kept) = frontier([operator(0, kept_bytes=8)], 0)
    assert kept.mode == ["0:aten.op0.default"]


def test_a_block_without_operators_has_one_choice() -> None:
    (choice,) = frontier([], 7)
    assert (choice.kept_bytes, choice.seconds) == (7, 0.0)
