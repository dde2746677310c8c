"""Attention's kernels under Triton's interpreter, held to the plain versions. Run by test_interpreted.py."""

import pytest
import torch

import serve.kernels.interpreting  # noqa: F401  # before a kernel is called
from serve.kernels.pages import far, paged
from tonnage.serve.kernels.chunks import attend_chunks_reference, attend_chunks_triton
from tonnage.serve.kernels.decode import attend_decode_reference, attend_decode_triton

SHAPES = [  # query heads, KV heads, head dim, window, soft cap
    (4, 2, 64, 0, 0.0),
    (5, 1, 80, 0, 0.0),
    (2, 2, 128, 40, 0.0),
    (4, 2, 96, 0, 5.0),
    (2, 1, 256, 70, 3.0),
    (20, 1, 64, 0, 0.0),
]


@pytest.mark.parametrize(("splits", "fp8"), [(1, False), (4, True)])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "window", "soft_cap"), SHAPES)
def test_decode(heads: int, kv_heads: int, head_dim: int, window: int, soft_cap: float, splits: int, fp8: bool) -> None:
    torch.manual_seed(0)
    cache = paged([1, 0, 16, 17, 150, 64], kv_heads=kv_heads, head_dim=head_dim, dtype=torch.float32, fp8=fp8)
    merged = torch.randn(6, 3 * heads * head_dim)
    query = merged[:, heads * head_dim : 2 * heads * head_dim].unflatten(1, (heads, head_dim))
    options = {"scale": head_dim**-0.5, "window": window, "soft_cap": soft_cap}
    order = cache.lengths.argsort(descending=True) if splits > 1 else None
    found = attend_decode_triton(query, cache.layer, cache.tables, cache.lengths, order=order, splits=splits, **options)
    expected = attend_decode_reference(query, cache.layer, cache.tables, cache.lengths, **options)
    assert far(found, expected) < 1e-5
    assert (found[1] == 0).all()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "window", "soft_cap"), SHAPES)
def test_chunks(heads: int, kv_heads: int, head_dim: int, window: int, soft_cap: float, fp8: bool) -> None:
    torch.manual_seed(0)
    lengths, chunks = [1, 20, 150, 70, 64], [1, 20, 3, 69, 10]
    cache = paged(lengths, kv_heads=kv_heads, head_dim=head_dim, dtype=torch.float32, fp8=fp8)
    starts = torch.tensor([0, *chunks], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    query = torch.randn(sum(chunks), heads, head_dim)
    options = {"scale": head_dim**-0.5, "window": window, "soft_cap": soft_cap}
    where = (query, cache.layer, cache.tables, cache.lengths, starts, max(chunks))
    assert far(attend_chunks_triton(*where, **options), attend_chunks_reference(*where, **options)) < 1e-5
