"""Which rank is the odd one out: told by what most others hold, however many ranks a line stands for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusters import cluster_of, one_dies, one_odd
from tonnage.recording import ClusterSummary, RankSummary
from tonnage.report.runs.odd_ranks import compare_ranks, spans_of
from tonnage.units import GIB

EMPTY = cluster_of("8xh200").summary


def cluster(*ranks: RankSummary) -> ClusterSummary:
    values = {name: getattr(EMPTY, name) for name in EMPTY.__slots__}
    return ClusterSummary(**values | {"ranks": ranks, "gpus": sum(len(rank.stands_for) for rank in ranks)})


def rank(first: int, gib: float, count: int = 1, **parts: float) -> RankSummary:
    """`gib` in activations, and more where parts are named; 1 GiB lies outside PyTorch."""
    ledger = {"activations": int(gib * GIB), **{part: int(size * GIB) for part, size in parts.items()}}
    held = sum(ledger.values())
    return RankSummary(
        rank=first, stands_for=tuple(range(first, first + count)), outcome="ok", peak_allocated_bytes=held,
        peak_reserved_bytes=held, peak_process_bytes=held + GIB, ledger=ledger,
    )  # fmt: skip


def odd(*ranks: RankSummary) -> list[int]:
    return [kind.first.rank for kind in compare_ranks(cluster(*ranks)).odd]


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        ([10, 10, 10, 20], [3]),
        ([10, 10, 10, 5], [3]),
        ([20, 10, 9], [0]),
        ([10, 20], []),  # of two none is odd
        ([10, 10, 20, 20], []),  # nor of two halves
        ([10, 10, 20, 21], []),
        ([8, 7, 6, 5, 4, 3, 2, 1], []),  # stages that need less and less
        ([8, 7, 6, 5, 4, 3, 2, 40], [7]),  # but for the last, which has the head
        ([10, 10, 10, 10.3], []),  # too little to speak of
        ([10, 10.1, 9.9, 10, 12], [4]),
        ([10], []),
        ([], []),
    ],
)
def test_who_is_odd(levels: list[float], expected: list[int]) -> None:
    assert odd(*(rank(number, level) for number, level in enumerate(levels))) == expected


def test_a_line_counts_as_often_as_it_has_ranks() -> None:
    assert odd(rank(0, 20), rank(1, 10, count=1000), rank(1001, 21)) == [0, 1001]
    assert odd(rank(0, 20, count=600), rank(600, 10), rank(601, 9)) == [600, 601]


def test_ranks_with_the_same_figures_are_one_kind_and_other_ledgers_another() -> None:
    found = compare_ranks(cluster(rank(0, 10, 2), rank(2, 10, 2), rank(4, 6, gradients=4)))
    assert [kind.ranks for kind in found.kinds] == [(0, 1, 2, 3), (4,)]
    assert found.odd == ()


def test_the_words_name_the_parts_that_make_the_difference_and_sum_to_it() -> None:
    found = compare_ranks(cluster(rank(0, 10, 7, gradients=2), rank(7, 14, gradients=1)))
    words = "rank 7 holds 3.00 GiB more than most ranks: activations +4.00 GiB, gradients −1.00 GiB"
    assert found.words_of(found.odd[0]) == words
    found = compare_ranks(cluster(*(rank(n, 10 - n / 10) for n in range(5)), rank(5, 1)))
    assert found.words_of(found.odd[0]) == "rank 5 holds 8.70 GiB less than the median rank: activations −8.70 GiB"


def test_what_many_small_parts_make_is_the_rest() -> None:
    small = dict.fromkeys(("gradients", "parameters", "workspace", "inputs"), 1.0)
    found = compare_ranks(cluster(rank(0, 10, 3), rank(3, 12, **small)))
    words = found.words_of(found.odd[0])
    assert words.endswith("activations +2.00 GiB, parameters +1.00 GiB, gradients +1.00 GiB, the rest +2.00 GiB")


def test_ranks_that_were_stopped_are_not_compared() -> None:
    found = compare_ranks(one_dies().summary)
    assert (found.typical, found.odd) == (None, ())
    assert [kind.verdict for kind in found.kinds] == ["stopped", "out of memory"]


def test_a_real_recording_s_parts_are_all_that_its_process_holds() -> None:
    found = compare_ranks(one_odd().summary)
    assert [kind.ranks for kind in found.odd] == [(7,)]
    for kind in found.kinds:
        assert sum(kind.parts.values()) == kind.process_bytes
        assert sum(found.over_typical(kind).values()) == found.over_bytes(kind)


@given(st.lists(st.tuples(st.integers(1, 100), st.integers(1, 9)), min_size=1, max_size=12))
def test_fewer_than_half_are_ever_odd_and_the_typical_one_never_is(lines: list[tuple[int, int]]) -> None:
    ranks, first = [], 0
    for level, count in lines:
        ranks.append(rank(first, level, count))
        first += count
    found = compare_ranks(cluster(*ranks))
    assert 2 * sum(len(kind.ranks) for kind in found.odd) < first
    assert found.typical is not None and found.typical not in found.odd
    assert sorted(number for kind in found.kinds for number in kind.ranks) == list(range(first))


def test_spans_are_shortened_to_the_first_and_the_last() -> None:
    assert spans_of([0, 1, 2, 8]) == "0–2, 8"
    assert spans_of(range(0, 1024, 2)) == "0, … 1022"
