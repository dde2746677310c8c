"""Tiled attention against attention written out."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fit.observed import Largest
from tonnage.fit.layers.tiled_softmax import Scores, tiled_attention


def _plain(
    query: Tensor, key: Tensor, value: Tensor, scores: Scores, bias: Tensor | None, sinks: Tensor | None
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    values = query @ key.mT * scores.scaling
    if scores.soft_cap is not None:
        values = scores.soft_cap * torch.tanh(values / scores.soft_cap)
    if bias is not None:
        values = values + bias
    counts = torch.ones(values.shape, dtype=torch.bool)
    rows, keys = torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])
    if scores.causal:
        counts &= (keys <= rows) & (keys > rows - (scores.window or key.shape[2] + 1))
    if scores.keys is not None:
        counts &= scores.keys[:, None, None]
    if scores.mask is not None:
        counts &= scores.mask
    values = values.masked_fill(~counts, float("-inf"))
    if sinks is not None:
        values = torch.cat([values, sinks.view(1, -1, 1, 1).expand(*values.shape[:3], 1)], -1)
    return torch.softmax(values, -1)[..., : key.shape[2]].nan_to_num() @ value


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@settings(deadline=None, max_examples=80)
@given(
    length=st.integers(1, 20),
    groups=st.sampled_from([1, 3]),
    tile_rows=st.integers(1, 24),
    causal=st.booleans(),
    window=st.one_of(st.none(), st.integers(1, 8)),
    soft_cap=st.sampled_from([None, 2.0]),
    bias_shape=st.sampled_from([None, "full", "one batch", "one row"]),
    with_sinks=st.booleans(),
    padded=st.booleans(),
    masked=st.booleans(),
    seed=st.integers(0, 100),
)
def test_output_and_gradients_are_those_of_attention_written_out(
    length: int,
    groups: int,
    tile_rows: int,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
    bias_shape: str | None,
    with_sinks: bool,
    padded: bool,
    masked: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    heads = 2 * groups
    leaves: dict[str, Any] = {
        "query": _random(2, heads, length, 5),
        "key": _random(2, 2, length, 5),
        "value": _random(2, 2, length, 3),
    }
    shapes = {"full": (2, heads, length, length), "one batch": (1, heads, length, length), "one row": (2, 1, 1, length)}
    bias = None if bias_shape is None else _random(*shapes[bias_shape])
    sinks = _random(heads) if with_sinks else None
    keys = torch.rand(2, length) < 0.7 if padded else None
    if keys is not None:
        keys[:, 0] = True
    mask = torch.rand(2, 1, length, length) < 0.8 if masked else None
    if mask is not None:
        mask |= torch.eye(length, dtype=torch.bool) | (torch.arange(length) == 0)
    scores = Scores(scaling=0.4, soft_cap=soft_cap, causal=causal, window=window, keys=keys, mask=mask)
    blind = causal and window is not None and padded  # rows that see nothing have no gradient written out
    expected = _plain(*leaves.values(), scores, bias, sinks)
    found = tiled_attention(**leaves, scores=scores, tile_rows=tile_rows, bias=bias, sinks=sinks)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    trained = [leaf for leaf in (*leaves.values(), bias, sinks) if leaf is not None]
    if not blind:
        upstream = torch.randn_like(expected)
        of_expected, of_found = (torch.autograd.grad(output, trained, upstream) for output in (expected, found))
        torch.testing.assert_close(of_found, of_expected, rtol=1e-9, atol=1e-10)


def test_a_row_that_sees_nothing_gives_zeros_and_no_gradient() -> None:
    query, key, value = (_random(1, 2, 4, 3) for _ in range(3))
    keys = torch.tensor([[False, False, True, True]])
    found = tiled_attention(query, key, value, Scores(scaling=1.0, causal=True, keys=keys), tile_rows=3)
    found.sum().backward()
    assert (found[:, :, :2] == 0).all()
    assert all(leaf.grad.isfinite().all() for leaf in (query, key, value))


def test_memory_grows_with_the_length_and_not_its_square() -> None:
    largest = []
    for length in (256, 512):
        query, key, value = (torch.randn(1, 2, length, 4, requires_grad=True) for _ in range(3))
        with Largest() as seen:
            tiled_attention(query, key, value, Scores(scaling=1.0, soft_cap=5.0), tile_rows=16).sum().backward()
        largest.append(seen.elements)
    assert largest == [2 * 16 * 256, 2 * 16 * 512]


def test_what_is_dropped_is_dropped_again_in_backward() -> None:
    """The output is linear in the values: its gradient there tells which weights were kept."""
    torch.manual_seed(0)
    query, key, value = (_random(1, 1, 40, 3) for _ in range(3))
    scores = Scores(scaling=0.3, dropout=0.5, seed=7)
    output = tiled_attention(query, key, value, scores, tile_rows=16)
    (gradient,) = torch.autograd.grad(output, value, torch.ones_like(output))
    torch.testing.assert_close((gradient * value).sum(), output.sum())


def test_dropout_keeps_the_mean_and_its_gradient_is_that_of_what_was_kept() -> None:
    torch.manual_seed(0)
    query, key, value = (_random(1, 2, 12, 3) for _ in range(3))
    plain = tiled_attention(query, key, value, Scores(scaling=0.3), tile_rows=5)
    draws = [
        tiled_attention(query, key, value, Scores(scaling=0.3, dropout=0.2, seed=seed * 1000), tile_rows=5)
        for seed in range(400)
    ]
    torch.testing.assert_close(torch.stack(draws).mean(0), plain, rtol=0, atol=0.12)
    assert torch.autograd.gradcheck(
        lambda *leaves: tiled_attention(*leaves, Scores(scaling=0.3, dropout=0.2, seed=3), tile_rows=5),
        (query, key, value),
    )
