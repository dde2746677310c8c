"""Keys and values into their pages, plain: turned as complex numbers, normed a head at a time, and slots one by one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from serve.kernels.pages import far
from tonnage.serve.batch import LayerCache
from tonnage.serve.kernels import store

T = 9


def _cache(kv_heads: int, head_dim: int, block: int = 16, *, fp8: bool = False) -> LayerCache:
    pages = [torch.zeros(T * 16 // block, block, kv_heads, head_dim, dtype=torch.float64) for _ in "kv"]
    if not fp8:
        return LayerCache(*pages)
    scales = [torch.zeros(pages[0].shape[:3], dtype=torch.bfloat16) for _ in "kv"]
    return LayerCache(*(page.to(torch.float8_e4m3fn) for page in pages), *scales)


def _turned(rows: Tensor, angles: Tensor) -> Tensor:
    """The first half as real parts, the second as imaginary ones."""
    left, right, rest = rows.split((angles.shape[-1], angles.shape[-1], rows.shape[-1] - 2 * angles.shape[-1]), dim=-1)
    turned = torch.complex(left, right) * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    return torch.cat((turned.real, turned.imag, rest), dim=-1)


def _normed(rows: Tensor, weight: Tensor | None, offset: float) -> Tensor:
    if weight is None:
        return rows
    return torch.stack(
        [row / (row @ row / len(row) + 1e-5) ** 0.5 * (weight + offset) for row in rows.flatten(0, 1)]
    ).view_as(rows)


@settings(max_examples=40)
@given(
    heads=st.sampled_from([(1, 1), (4, 2), (5, 1)]),
    dims=st.sampled_from([(64, 64), (80, 32), (96, 96), (128, 64), (256, 256)]),
    block=st.sampled_from([4, 16]),
    norm=st.booleans(),
    offset=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 99),
)
def test_queries_turn_and_keys_and_values_lie_in_their_slots(
    heads: tuple[int, int], dims: tuple[int, int], block: int, norm: bool, offset: float, seed: int
) -> None:
    torch.manual_seed(seed)
    (query_heads, kv_heads), (head_dim, rotary) = heads, dims
    merged = torch.randn(T, (query_heads + 2 * kv_heads) * head_dim, dtype=torch.float64)
    parts = merged.split([n * head_dim for n in (query_heads, kv_heads, kv_heads)], dim=1)
    query, key, value = (part.unflatten(1, (-1, head_dim)) for part in parts)
    angles = torch.rand(40, rotary // 2, dtype=torch.float64) * 6
    weights = [torch.randn(head_dim, dtype=torch.float64) if norm else None for _ in "qk"]
    positions, slots = torch.randint(40, (T,)), torch.randperm(T * 16)[:T]
    layer = _cache(kv_heads, head_dim, block)
    found = store(query, key, value, positions, slots, layer, cos=angles.cos(), sin=angles.sin(),
                  query_norm=weights[0], key_norm=weights[1], eps=1e-5, norm_offset=offset)  # fmt: skip
    assert far(found, _turned(_normed(query, weights[0], offset), angles[positions])) < 1e-12
    keys = _turned(_normed(key, weights[1], offset), angles[positions])
    for token, slot in enumerate(slots.tolist()):
        assert far(layer.keys[slot // block, slot % block], keys[token]) < 1e-12
        assert torch.equal(layer.values[slot // block, slot % block], value[token])
    assert (layer.keys.flatten(0, 1).abs().sum((1, 2)) > 0).sum() == T


def test_an_fp8_cache_keeps_each_head_within_its_own_rounding() -> None:
    torch.manual_seed(0)
    rows = torch.randn(T, 2, 64) * 10.0 ** torch.arange(-4, 5)[:, None, None]
    layer, still = _cache(2, 64, fp8=True), torch.zeros(1, 32)
    store(
        rows, rows, rows, torch.zeros(T, dtype=torch.int64), torch.arange(T), layer, cos=still + 1, sin=still, eps=0.0
    )
    for pages, scales in ((layer.keys, layer.key_scales), (layer.values, layer.value_scales)):
        assert scales is not None
        meant = (pages.double() * scales.double().unsqueeze(-1)).flatten(0, 1)[:T]
        error = (meant - rows).abs() / rows.abs().amax(-1, keepdim=True)
        assert error.max() < 0.5 * 2**-3  # half a step of the largest binade


@pytest.mark.parametrize("fp8", [False, True])
def test_zeros_stay_zeros(fp8: bool) -> None:
    layer, rows, still = _cache(1, 64, fp8=fp8), torch.zeros(2, 1, 64), torch.zeros(1, 32)
    norm = torch.ones(64)
    where = torch.tensor([0, 17])
    store(rows, rows, rows, where * 0, where, layer, cos=still + 1, sin=still, query_norm=norm, key_norm=norm, eps=1e-6)
    assert (layer.keys.float() == 0).all() and (layer.values.float() == 0).all()
