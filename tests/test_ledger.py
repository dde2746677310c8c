from hypothesis import given
from hypothesis import strategies as st

from tonnage.ledger import Category, Ledger

entries = st.lists(st.tuples(st.sampled_from(Category), st.integers(min_value=0, max_value=2**40)))


@given(entries)
def test_the_categories_sum_to_the_total(found: list[tuple[Category, int]]) -> None:
    ledger = Ledger.of(found)
    assert ledger.total_bytes == sum(size for _, size in found)
    assert all(ledger[category] == sum(size for c, size in found if c is category) for category in Category)


@given(entries)
def test_ranked_goes_from_large_to_small(found: list[tuple[Category, int]]) -> None:
    sizes = [size for _, size in Ledger.of(found).ranked()]
    assert sizes == sorted(sizes, reverse=True)
    assert 0 not in sizes


def test_labels_are_words() -> None:
    assert Category.KV_CACHE.label == "KV cache"
    assert Category.OPTIMIZER_STATES.label == "optimizer states"
