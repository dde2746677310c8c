"""The kernels that go row by row under Triton's interpreter, held to the plain versions. Run by test_interpreted.py."""

import pytest
import torch
from torch import Tensor

import serve.kernels.interpreting  # noqa: F401  # before a kernel is called
from serve.kernels.pages import far
from tonnage.serve.batch import LayerCache
from tonnage.serve.kernels.logit_threshold import logit_threshold_reference, logit_threshold_triton
from tonnage.serve.kernels.matmul8 import matmul8_reference, matmul8_triton
from tonnage.serve.kernels.norm import (
    add_norm_reference,
    add_norm_triton,
    gelu_tanh_mul_reference,
    gelu_tanh_mul_triton,
    silu_mul_reference,
    silu_mul_triton,
)
from tonnage.serve.kernels.sample import sample_reference, sample_triton
from tonnage.serve.kernels.store import store_reference, store_triton


def _cache(kv_heads: int, head_dim: int, *, fp8: bool) -> LayerCache:
    pages = [torch.zeros(4, 16, kv_heads, head_dim) for _ in "kv"]
    if not fp8:
        return LayerCache(*pages)
    scales = [torch.ones(4, 16, kv_heads).bfloat16() for _ in "kv"]
    return LayerCache(*(page.to(torch.float8_e4m3fn) for page in pages), *scales)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary", "norm"),
    [(4, 2, 64, 64, True), (10, 9, 80, 32, False), (2, 1, 96, 96, True), (3, 1, 256, 128, False)],
)
def test_store(heads: int, kv_heads: int, head_dim: int, rotary: int, norm: bool, fp8: bool) -> None:
    torch.manual_seed(0)
    merged = torch.randn(7, (heads + 2 * kv_heads) * head_dim)
    query, key, value = (
        part.unflatten(1, (-1, head_dim))
        for part in merged.split([n * head_dim for n in (heads, kv_heads, kv_heads)], 1)
    )
    value[3, 0] = 0
    cos, sin = torch.randn(50, rotary // 2), torch.randn(50, rotary // 2)
    positions, slots = torch.tensor([0, 49, 3, 4, 5, 6, 0]), torch.tensor([16, 63, 17, 18, 35, 0, 1])
    options = {"cos": cos, "sin": sin, "eps": 1e-5, "norm_offset": 0.5}
    if norm:
        options |= {"query_norm": torch.randn(head_dim), "key_norm": torch.randn(head_dim)}
    expected, found = _cache(kv_heads, head_dim, fp8=fp8), _cache(kv_heads, head_dim, fp8=fp8)
    turned = store_reference(query, key, value, positions, slots, expected, **options)
    assert far(store_triton(query, key, value, positions, slots, found, **options), turned) < 1e-6
    # The interpreter cuts BF16 off and has a rounding of FP8 of its own.
    for mine, its in zip(_meant(found), _meant(expected), strict=True):
        assert far(mine, its) < (0.07 if fp8 else 1e-6)


def _meant(layer: LayerCache) -> tuple[Tensor, Tensor]:
    if layer.key_scales is None or layer.value_scales is None:
        return layer.keys, layer.values
    return (
        layer.keys.float() * layer.key_scales.float().unsqueeze(-1),
        layer.values.float() * layer.value_scales.float().unsqueeze(-1),
    )


@pytest.mark.parametrize("width", [64, 96, 200])
def test_add_norm(width: int) -> None:
    torch.manual_seed(0)
    hidden, residual, weight = torch.randn(5, width), torch.randn(5, width), torch.randn(width)
    for found, expected in zip(
        add_norm_triton(hidden, residual.clone(), weight, 1e-6, offset=1.0),
        add_norm_reference(hidden, residual.clone(), weight, 1e-6, offset=1.0),
        strict=True,
    ):
        assert far(found, expected) < 1e-6
    normed, kept = add_norm_triton(hidden, None, weight, 1e-6)
    assert kept is hidden
    assert far(normed, add_norm_reference(hidden, None, weight, 1e-6)[0]) < 1e-6


@pytest.mark.parametrize("width", [64, 1100])
def test_gated(width: int) -> None:
    torch.manual_seed(0)
    rows = torch.randn(3, 2 * width) * 4
    assert far(silu_mul_triton(rows), silu_mul_reference(rows)) < 1e-6
    assert far(gelu_tanh_mul_triton(rows), gelu_tanh_mul_reference(rows)) < 1e-6


@pytest.mark.parametrize("vocabulary", [33, 2048, 5000])
def test_draw(vocabulary: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(12, vocabulary)
    logits[4:6] = logits[4:6].round()  # full of equals
    logits[8, 1:] = float("-inf")
    temperatures = torch.tensor([0.0, 0.6, 1.0, 2.0, 0.0, 0.0] * 2)
    seeds = torch.tensor([0, -1, 2**40 + 3, 7, 7, 7] * 2)
    positions = torch.tensor([0, 1, 2, 2**33 + 1, 4, 5] * 2)
    found = sample_triton(logits, temperatures, seeds, positions)
    assert found.tolist() == sample_reference(logits, temperatures, seeds, positions).tolist()


@pytest.mark.parametrize("vocabulary", [33, 4096, 9000])
def test_least(vocabulary: int) -> None:
    torch.manual_seed(vocabulary)
    rules = torch.tensor(
        [
            (top_k, top_p, min_p)
            for first, top_k in enumerate((1, 3, 20, vocabulary, 2**31))
            for second, top_p in enumerate((1.0, 0.9, 0.3, 1e-6))
            for third, min_p in enumerate((0.0, 0.1, 1.0))
            if (first + second + third) % 3 == 0  # each number still meets each one of the other two rules
        ]
    )
    if vocabulary > 33:  # the interpreter takes a while for a long row, and a third of them has every number above
        rules = rules[::3]
    rows = torch.arange(len(rules))
    logits = torch.randn(len(rules), vocabulary) * 4 - 2
    logits[::4] = logits[::4].round()  # full of equals
    logits[::5, 1::2] = float("-inf")
    temperatures = torch.tensor([0.7, 1.0, 2.0, 0.0])[(rows + rows // 4) % 4]
    wishes = (temperatures, *rules.T.contiguous())
    found, expected = (way(logits, *wishes).unsqueeze(1) for way in (logit_threshold_triton, logit_threshold_reference))
    # Which logits stay: where all do, any lower bound says so.
    assert torch.equal(logits >= found, logits >= expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("rows", "depth", "outputs"), [(1, 64, 40), (17, 200, 130), (70, 128, 4200)])
def test_matmul8(rows: int, depth: int, outputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight8 = torch.randn(rows, depth), (torch.randn(outputs, depth) * 30).clamp(-127, 127).to(dtype)
    scales = torch.rand(outputs)
    assert far(matmul8_triton(x, weight8, scales), matmul8_reference(x, weight8, scales)) < 1e-6
