"""Caches with known contents: sequences laid out over shuffled pages, and the same as plain rows of keys and values.

Pages that no sequence owns hold NaN (FP8: its largest numbers), so that whoever reads them is found out.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tonnage.serve.batch import LayerCache


@dataclass
class Paged:
    """A layer's cache, the tables of its sequences, and what they hold."""

    layer: LayerCache
    tables: Tensor  # int32 [sequences, most blocks + 1]
    lengths: Tensor  # int32
    keys: list[Tensor]  # each [length, KV heads, head dim], as a reader of the cache should see them
    values: list[Tensor]


def paged(
    lengths: list[int],
    *,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float64,
    block: int = 16,
    fp8: bool = False,
    device: str = "cpu",
    seed: int = 0,
) -> Paged:
    """Sequences of these lengths on pages in no order."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // block) for length in lengths]
    order = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
    tables = torch.zeros(len(lengths), max([*counts, 0]) + 1, dtype=torch.int32)
    pages = [torch.full((len(order) + 1, block, kv_heads, head_dim), float("nan"), dtype=torch.float64) for _ in "kv"]
    rows: tuple[list[Tensor], list[Tensor]] = ([], [])
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        blocks, order = order[:count], order[count:]
        tables[row, :count] = torch.tensor(blocks, dtype=torch.int32)
        for kept, into in zip(rows, pages, strict=True):
            kept.append(torch.randn(length, kv_heads, head_dim, generator=generator, dtype=torch.float64))
            flat = into[blocks].flatten(0, 1)
            flat[:length] = kept[-1]
            into[blocks] = flat.unflatten(0, (count, block))
    layer = _narrowed(pages) if fp8 else LayerCache(*(page.to(dtype) for page in pages))
    found = Paged(layer, tables, torch.tensor(lengths, dtype=torch.int32), *rows)
    if dtype != torch.float64 or fp8:
        _reread(found)
    return moved(found, device)


def _narrowed(pages: list[Tensor]) -> LayerCache:
    scales = [page.nan_to_num(0.0).abs().amax(-1).div(448).clamp(min=1e-12).bfloat16() for page in pages]
    narrow = [
        (page / scale.double().unsqueeze(-1)).nan_to_num(448.0).clamp(-448, 448).to(torch.float8_e4m3fn)
        for page, scale in zip(pages, scales, strict=True)
    ]
    return LayerCache(*narrow, *scales)


def _reread(found: Paged) -> None:
    """Rows as the cache has rounded them."""
    layer = found.layer
    for rows, pages, scales in (
        (found.keys, layer.keys, layer.key_scales),
        (found.values, layer.values, layer.value_scales),
    ):
        whole = pages.double() if scales is None else pages.double() * scales.double().unsqueeze(-1)
        for row, (table, length) in enumerate(zip(found.tables, found.lengths.tolist(), strict=True)):
            rows[row] = whole[table.long()].flatten(0, 1)[:length]


def moved(found: Paged, device: str) -> Paged:
    """The same on a device; the plain rows too."""
    layer = found.layer
    scales = [None if each is None else each.to(device) for each in (layer.key_scales, layer.value_scales)]
    return Paged(
        LayerCache(layer.keys.to(device), layer.values.to(device), *scales),
        found.tables.to(device),
        found.lengths.to(device),
        [each.to(device) for each in found.keys],
        [each.to(device) for each in found.values],
    )


def dense(
    query: Tensor, keys: Tensor, values: Tensor, *, scale: float, window: int = 0, soft_cap: float = 0.0
) -> Tensor:
    """Attention of the last len(query) positions over all keys, one head and one row at a time, in FP64."""
    out = torch.zeros(query.shape, dtype=torch.float64, device=query.device)
    group = query.shape[1] // keys.shape[1]
    for row, head in ((row, head) for row in range(len(query)) for head in range(query.shape[1])):
        end = len(keys) - len(query) + row + 1
        begin = max(0, end - window) if window else 0
        scores = keys[begin:end, head // group].double() @ query[row, head].double() * scale
        scores = soft_cap * (scores / soft_cap).tanh() if soft_cap else scores
        if end > begin:
            weights = (scores - scores.max()).exp()
            out[row, head] = weights @ values[begin:end, head // group].double() / weights.sum()
    return out


def far(found: Tensor, expected: Tensor) -> float:
    """The distance, relative to the size of what is expected."""
    size = expected.double().norm().item()
    return (found.double() - expected.double()).norm().item() / (size or 1.0)
