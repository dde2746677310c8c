"""Blocks of the cache: what they weigh, and that they arrive whole where they are sent."""

from random import Random

import pytest
import torch
from torch import Tensor

from tonnage.serve.cache.kv_cache import CacheShape, KvCache

CPU = torch.device("cpu")


def make(*, blocks: int = 40, host_blocks: int = 0, fp8: bool = False, dtype: torch.dtype = torch.float32) -> KvCache:
    """A cache whose every number is different, as far as its precision goes."""
    shape = CacheShape(layers=3, kv_heads=2, head_dim=4, dtype=dtype, block=5, fp8=fp8)
    cache = KvCache(shape, blocks, CPU, host_blocks=host_blocks)
    for part in parts(cache):
        part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(1)))
    return cache


def parts(cache: KvCache) -> list[Tensor]:
    return [cache.pages] if cache.scales is None else [cache.pages, cache.scales]


def block_of(cache: KvCache, block: int) -> list[Tensor]:
    return [part[:, :, block].float().clone() for part in parts(cache)]


def copied(cache: KvCache) -> list[Tensor]:
    return [part.float().clone() for part in parts(cache)]


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_per_block_are_those_of_the_tensors(fp8: bool, dtype: torch.dtype) -> None:
    cache = make(fp8=fp8, dtype=dtype)
    assert sum(part.nbytes for part in parts(cache)) == cache.size_bytes == 40 * cache.shape.bytes_per_block


def test_layers_are_views() -> None:
    cache = make(fp8=True)
    layer = cache.layers[1]
    assert layer.block_size == 5
    assert layer.keys.data_ptr() == cache.pages[1, 0].data_ptr()
    assert layer.values.data_ptr() == cache.pages[1, 1].data_ptr()
    assert layer.key_scales is not None and layer.value_scales is not None and cache.scales is not None
    assert layer.key_scales.data_ptr() == cache.scales[1, 0].data_ptr()
    assert layer.value_scales.data_ptr() == cache.scales[1, 1].data_ptr()


def test_a_new_cache_is_zero() -> None:
    assert not KvCache(make().shape, 3, CPU).pages.any()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("count", [1, 3, 37])
def test_copies(fp8: bool, count: int) -> None:
    """More blocks than are gathered at once, too; one source may have several targets."""
    cache = make(blocks=80, fp8=fp8)
    before, targets = copied(cache), Random(count).sample(range(40, 80), count)
    pairs = [(Random(target).randrange(40), target) for target in targets]
    cache.copy(pairs)
    for old, new in zip(before, copied(cache), strict=True):
        for source, target in pairs:
            old[:, :, target] = old[:, :, source]
        assert torch.equal(old, new)


@pytest.mark.parametrize("fp8", [False, True])
def test_swaps_there_and_back_again(fp8: bool) -> None:
    cache, random = make(host_blocks=30, fp8=fp8), Random(2)
    before = [block_of(cache, block) for block in range(40)]
    out = list(zip(random.sample(range(40), 25), random.sample(range(1, 31), 25), strict=True))
    cache.swap_out(out)
    cache.pages.zero_()
    places = random.sample(range(40), 25)
    cache.swap_in([(host, place) for (_, host), place in zip(out, places, strict=True)])
    for (source, _), place in zip(out, places, strict=True):
        # Scales were not zeroed, so blocks that nobody swapped into may hold anything.
        for old, new in zip(before[source], block_of(cache, place), strict=True):
            assert torch.equal(old, new)


def test_host_blocks_keep_what_they_have_until_they_are_written() -> None:
    cache = make(host_blocks=4)
    first, second = block_of(cache, 7), block_of(cache, 8)
    cache.swap_out([(7, 1)])
    cache.swap_out([(8, 2)])
    cache.swap_in([(1, 20), (2, 21)])
    assert torch.equal(block_of(cache, 20)[0], first[0]) and torch.equal(block_of(cache, 21)[0], second[0])
