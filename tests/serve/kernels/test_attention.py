"""Attention over pages, plain: against attention one row and one head at a time, over all shapes."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.kernels.pages import dense, far, paged
from tonnage.serve.kernels.chunks import attend_chunks_reference
from tonnage.serve.kernels.decode import MOST_SPLITS, attend_decode_reference, count_splits

shapes = st.fixed_dictionaries(
    {
        "group": st.sampled_from([1, 2, 3, 5, 8]),
        "kv_heads": st.sampled_from([1, 2, 3]),
        "head_dim": st.sampled_from([64, 80, 96, 128, 256]),
        "block": st.sampled_from([1, 4, 16]),
        "fp8": st.booleans(),
    }
)
masks = st.fixed_dictionaries(
    {
        "scale": st.sampled_from([0.05, 0.125]),
        "window": st.sampled_from([0, 1, 7, 16, 40]),
        "soft_cap": st.sampled_from([0.0, 2.0, 30.0]),
    }
)
chunk = st.tuples(st.integers(0, 30), st.integers(1, 20))  # tokens before it, its own


@settings(max_examples=60)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=5), shapes, masks)
def test_each_row_attends_to_its_own_keys(lengths: list[int], shape: dict, mask: dict) -> None:
    group = shape.pop("group")
    cache = paged(lengths, **shape)
    query = torch.randn(len(lengths), group * shape["kv_heads"], shape["head_dim"], dtype=torch.float64)
    found = attend_decode_reference(query, cache.layer, cache.tables, cache.lengths, **mask)
    for row in range(len(lengths)):
        truth = dense(query[row : row + 1], cache.keys[row], cache.values[row], **mask)
        assert far(found[row : row + 1], truth) < 1e-12


@settings(max_examples=60)
@given(st.lists(chunk, min_size=1, max_size=4), shapes, masks)
def test_each_row_of_a_chunk_attends_to_what_is_before_it(
    chunks: list[tuple[int, int]], shape: dict, mask: dict
) -> None:
    group = shape.pop("group")
    cache = paged([before + own for before, own in chunks], **shape)
    starts = torch.tensor([0, *(own for _, own in chunks)]).cumsum(0).int()
    query = torch.randn(int(starts[-1]), group * shape["kv_heads"], shape["head_dim"], dtype=torch.float64)
    longest = max(own for _, own in chunks)
    found = attend_chunks_reference(query, cache.layer, cache.tables, cache.lengths, starts, longest, **mask)
    for row, (start, end) in enumerate(zip(starts.tolist(), starts[1:].tolist(), strict=False)):
        truth = dense(query[start:end], cache.keys[row], cache.values[row], **mask)
        assert far(found[start:end], truth) < 1e-12


def test_a_chunk_of_one_is_a_decode() -> None:
    cache = paged([33, 5], kv_heads=2, head_dim=64, dtype=torch.float32)
    query = torch.randn(2, 4, 64)
    where = (query, cache.layer, cache.tables, cache.lengths)
    by_chunks = attend_chunks_reference(*where, torch.tensor([0, 1, 2]), 1, scale=0.1, window=9)
    assert far(by_chunks, attend_decode_reference(*where, scale=0.1, window=9)) < 1e-6


def test_no_rows_give_no_rows() -> None:
    cache = paged([], kv_heads=1, head_dim=64, dtype=torch.float32)
    empty = torch.empty(0, 2, 64)
    assert attend_decode_reference(empty, cache.layer, cache.tables, cache.lengths, scale=1.0).shape == (0, 2, 64)
    none = torch.zeros(1, dtype=torch.int32)
    assert attend_chunks_reference(empty, cache.layer, cache.tables, cache.lengths, none, 0, scale=1.0).shape == (
        0,
        2,
        64,
    )


def test_few_sequences_are_read_in_parts() -> None:
    assert count_splits(256, 8, 132) == 1
    assert count_splits(66, 8, 132) == 1
    assert count_splits(65, 8, 132) == 2
    assert count_splits(16, 8, 132) == 8
    assert count_splits(1, 1, 132) == MOST_SPLITS
