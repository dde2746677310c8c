"""The kernels of serving on a real GPU: BF16, and an FP8 cache, against FP64; and replayed from a CUDA graph."""

import pytest
import torch
from torch import Tensor

from serve.kernels.pages import Paged, dense, far, moved, paged
from tonnage.serve import kernels
from tonnage.serve.batch import LayerCache
from tonnage.serve.kernels.decode import count_splits

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

TOLERANCE = 1e-2
SHAPES = [  # query heads, KV heads, head dim, window, soft cap
    (32, 8, 128, 0, 0.0),
    (40, 8, 128, 0, 0.0),
    (14, 2, 64, 0, 0.0),
    (8, 8, 80, 100, 0.0),
    (6, 2, 96, 0, 20.0),
    (8, 4, 256, 128, 50.0),
    (32, 1, 128, 0, 0.0),
]
shapes = pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "window", "soft_cap"), SHAPES)
caches = pytest.mark.parametrize("fp8", [False, True])


def _pages(lengths: list[int], kv_heads: int, head_dim: int, *, fp8: bool) -> tuple[Paged, Paged]:
    """On the host and on the card."""
    here = paged(lengths, kv_heads=kv_heads, head_dim=head_dim, dtype=torch.bfloat16, fp8=fp8)
    return here, moved(here, "cuda")


@caches
@shapes
@pytest.mark.parametrize("rows", [5, 120])
def test_decode(heads: int, kv_heads: int, head_dim: int, window: int, soft_cap: float, fp8: bool, rows: int) -> None:
    torch.manual_seed(0)
    lengths = [0, 1, 16, 700, 2049, *torch.randint(1, 300, (rows - 5,)).tolist()]
    here, there = _pages(lengths, kv_heads, head_dim, fp8=fp8)
    query = torch.randn(rows, heads, head_dim).bfloat16()
    options = {"scale": head_dim**-0.5, "window": window, "soft_cap": soft_cap}
    order = there.lengths.argsort(descending=True) if rows > 5 else None
    found = kernels.attend_decode(query.cuda(), there.layer, there.tables, there.lengths, order=order, **options).cpu()
    for row in (0, 1, 2, 3, 4, rows - 1):
        truth = dense(query[row : row + 1], here.keys[row], here.values[row], **options)
        assert far(found[row : row + 1], truth) < TOLERANCE, (row, lengths[row])
    assert (found[0] == 0).all()


@caches
@shapes
def test_chunks(heads: int, kv_heads: int, head_dim: int, window: int, soft_cap: float, fp8: bool) -> None:
    torch.manual_seed(0)
    lengths, chunks = [1, 300, 129, 1000, 64], [1, 300, 7, 333, 64]
    here, there = _pages(lengths, kv_heads, head_dim, fp8=fp8)
    starts = torch.tensor([0, *chunks]).cumsum(0).int()
    query = torch.randn(sum(chunks), heads, head_dim).bfloat16()
    options = {"scale": head_dim**-0.5, "window": window, "soft_cap": soft_cap}
    found = kernels.attend_chunks(
        query.cuda(), there.layer, there.tables, there.lengths, starts.cuda(), max(chunks), **options
    )
    truth = kernels.attend_chunks_reference(
        query.double(), here.layer, here.tables, here.lengths, starts, max(chunks), **options
    )
    assert far(found.cpu(), truth) < TOLERANCE


def _empty_cache(kv_heads: int, head_dim: int, device: str, *, fp8: bool) -> LayerCache:
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    pages = [torch.zeros(40, 16, kv_heads, head_dim, device=device).to(dtype) for _ in "kv"]
    scales = [torch.zeros(40, 16, kv_heads, device=device, dtype=torch.bfloat16) for _ in "kv"]
    return LayerCache(*pages, *scales) if fp8 else LayerCache(*pages)


def _meant(layer: LayerCache) -> Tensor:
    both = torch.stack((layer.keys.double(), layer.values.double()))
    if layer.key_scales is None or layer.value_scales is None:
        return both
    return both * torch.stack((layer.key_scales.double(), layer.value_scales.double())).unsqueeze(-1)


@caches
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary"), [(32, 8, 128, 128), (14, 2, 64, 64), (9, 9, 80, 32)]
)
def test_store(heads: int, kv_heads: int, head_dim: int, rotary: int, fp8: bool) -> None:
    torch.manual_seed(0)
    merged = torch.randn(300, (heads + 2 * kv_heads) * head_dim).bfloat16()
    sizes = [number * head_dim for number in (heads, kv_heads, kv_heads)]
    angles = torch.rand(5000, rotary // 2) * 6.28
    positions, slots = torch.randint(5000, (300,)), torch.randperm(39 * 16)[:300] + 16
    norms = {"query_norm": torch.rand(head_dim).bfloat16(), "key_norm": torch.rand(head_dim).bfloat16()}

    def stored(device: str, dtype: torch.dtype) -> tuple[Tensor, LayerCache]:
        layer = _empty_cache(kv_heads, head_dim, device, fp8=fp8)
        rows = [part.unflatten(1, (-1, head_dim)) for part in merged.to(device, dtype).split(sizes, dim=1)]
        turns = {"cos": angles.cos().to(device), "sin": angles.sin().to(device)}
        weights = {name: norm.to(device) for name, norm in norms.items()}
        return kernels.store(*rows, positions.to(device), slots.to(device), layer, **turns, **weights, eps=1e-6), layer

    (found, cache), (truth, meant) = stored("cuda", torch.bfloat16), stored("cpu", torch.float64)
    assert far(found.cpu(), truth) < TOLERANCE
    assert far(_meant(cache).cpu(), _meant(meant)) < TOLERANCE


@pytest.mark.parametrize("width", [1024, 5120, 3000])
def test_rows(width: int) -> None:
    torch.manual_seed(0)
    hidden, residual, weight = (torch.randn(*shape).bfloat16() for shape in ((70, width), (70, width), (width,)))
    truth = kernels.add_norm(hidden.double(), residual.double(), weight.double(), 1e-6, offset=1.0)
    found = kernels.add_norm(hidden.cuda(), residual.cuda(), weight.cuda(), 1e-6, offset=1.0)
    assert all(far(mine.cpu(), its) < TOLERANCE for mine, its in zip(found, truth, strict=True))
    alone = kernels.add_norm(hidden.cuda(), None, weight.cuda(), 1e-6)[0]
    assert far(alone.cpu(), kernels.add_norm(hidden.double(), None, weight.double(), 1e-6)[0]) < TOLERANCE
    for kernel in (kernels.silu_mul, kernels.gelu_tanh_mul):
        assert far(kernel(hidden.cuda()).cpu(), kernel(hidden.double())) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("rows", [1, 33, 256, 1000])
def test_matmul8(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight8 = torch.randn(rows, 1000).bfloat16(), (torch.randn(4500, 1000) * 40).clamp(-127, 127).to(dtype)
    scales = torch.rand(4500) / 100
    truth = kernels.matmul8(x.double(), weight8, scales.double())
    assert far(kernels.matmul8(x.cuda(), weight8.cuda(), scales.cuda()).cpu(), truth) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draw(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(64, 151936) * 3).to(dtype)
    temperatures = torch.rand(64) * (torch.arange(64) % 4 > 0)
    seeds, positions = torch.randint(-(2**62), 2**62, (64,)), torch.randint(2**40, (64,))
    where = (logits, temperatures, seeds, positions)
    found, expected = kernels.sample(*(each.cuda() for each in where)).cpu(), kernels.sample(*where)
    greedy = temperatures == 0
    assert (found == expected)[greedy].all()
    assert (found == expected).sum() >= 63  # a logarithm may round to either side between two that are near


def test_logit_threshold() -> None:
    """All but a few rows agree: sums of shares are rounded, and one token more or less may stay."""
    torch.manual_seed(0)
    logits = torch.randn(64, 151936) * 3
    rules = torch.stack([torch.randint(1, 5000, (64,)).float(), torch.rand(64), torch.rand(64) * 0.01])
    rules[0, ::2], rules[1, 1::3], rules[2, 1::3] = 2.0**31, 1.0, 0.0
    where = (logits, torch.rand(64) + 0.3, *rules)
    found, expected = kernels.logit_threshold(*(each.cuda() for each in where)).cpu(), kernels.logit_threshold(*where)
    kept, meant = ((logits >= each.unsqueeze(1)).sum(1) for each in (found, expected))
    assert (kept == meant).sum() >= 48
    assert torch.equal(kept[1::3], meant[1::3])  # ranks are exact
    assert ((kept - meant).abs() <= 1 + meant // 1000).all()


@caches
def test_a_captured_step_serves_other_lengths(fp8: bool) -> None:
    torch.manual_seed(0)
    rows, heads, kv_heads, head_dim = 8, 16, 8, 128
    here, there = _pages([1, 500, 33, 64, 2000, 17, 128, 900], kv_heads, head_dim, fp8=fp8)
    assert count_splits(rows, kv_heads, torch.cuda.get_device_properties(0).multi_processor_count) > 1
    query, lengths = torch.randn(rows, heads, head_dim).bfloat16().cuda(), there.lengths.clone()

    def step() -> Tensor:
        return kernels.attend_decode(query, there.layer, there.tables, lengths, scale=head_dim**-0.5)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for shorter in (0, 1, 60, 2000):
        lengths.copy_((there.lengths - shorter).clamp(min=0))
        graph.replay()
        for row, length in enumerate(lengths.tolist()):
            truth = dense(
                query[row : row + 1].cpu(), here.keys[row][:length], here.values[row][:length], scale=head_dim**-0.5
            )
            assert far(found[row : row + 1].cpu(), truth) < TOLERANCE, (row, length)
