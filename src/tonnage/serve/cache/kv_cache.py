"""The KV cache: one tensor of pages for all layers, FP8 scales, and copies and swaps, a bounded number at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tonnage.serve.batch import LayerCache

# Blocks gathered at once in copies and swaps, which bounds their temporary memory.
_GATHERED_BLOCKS = 16
_SCALE_BYTES = 2

Pairs = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The shape of a cache without its number of blocks. `fp8` is e4m3 with a bfloat16 scale per token and head."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block: int = 16
    fp8: bool = False

    @property
    def bytes_per_block(self) -> int:
        """Bytes of keys and values of one block in every layer, with their scales."""
        vector = self.head_dim + _SCALE_BYTES if self.fp8 else self.head_dim * self.dtype.itemsize
        return self.layers * 2 * self.block * self.kv_heads * vector


class KvCache:
    """Pages [layers, 2, blocks, block, KV heads, head dim], zeros at first (no NaN); block 0 is null, host blocks from 1."""

    def __init__(self, shape: CacheShape, blocks: int, device: torch.device, *, host_blocks: int = 0) -> None:
        self.shape, self.blocks, self.device, self.host_blocks = shape, blocks, device, host_blocks
        self.allocate()
        # [host blocks, layers, 2, block, …]: each block is contiguous.
        self._host_parts = [
            torch.empty(
                (host_blocks + 1, *part.shape[:2], *part.shape[3:]), dtype=part.dtype, pin_memory=device.type == "cuda"
            )
            for part in self._parts
            if host_blocks
        ]

    def allocate(self) -> None:
        """Allocate the pages."""
        shape, device = self.shape, self.device
        rows = (shape.layers, 2, self.blocks, shape.block, shape.kv_heads)
        kept = torch.float8_e4m3fn if shape.fp8 else shape.dtype
        self.pages = torch.zeros(*rows, shape.head_dim, dtype=kept, device=device)
        self.scales = torch.zeros(rows, dtype=torch.bfloat16, device=device) if shape.fp8 else None
        scales = [()] * shape.layers if self.scales is None else self.scales
        self.layers = [LayerCache(*pages, *scale) for pages, scale in zip(self.pages, scales, strict=True)]
        # As bytes, since not every operator takes FP8.
        self._parts = [self.pages.view(torch.uint8)] if shape.fp8 else [self.pages]
        self._parts += [self.scales] if self.scales is not None else []

    def release(self) -> None:
        """Free the pages and their contents; `allocate` makes new ones."""
        self.pages, self.scales = self.pages.new_empty(0), None
        self.layers.clear()
        self._parts.clear()

    @property
    def size_bytes(self) -> int:
        """Bytes of the cache on the device."""
        return self.blocks * self.shape.bytes_per_block

    def copy(self, pairs: Pairs) -> None:
        """Copy block to block. All sources of a group are read before any target is written."""
        for group in _grouped(pairs):
            sources, targets = (self._index(list(blocks)) for blocks in zip(*group, strict=True))
            for part in self._parts:
                part.index_copy_(2, targets, part.index_select(2, sources))

    def swap_out(self, pairs: Pairs) -> None:
        """Copy (block, host block) pairs to the host."""
        for group in _grouped(pairs):
            sources = self._index([source for source, _ in group])
            for part, host in zip(self._parts, self._host_parts, strict=True):
                gathered = part.index_select(2, sources).movedim(2, 0).contiguous()
                for first, target, count in _runs([target for _, target in group]):
                    host[target : target + count].copy_(gathered[first : first + count], non_blocking=True)

    def swap_in(self, pairs: Pairs) -> None:
        """Copy (host block, block) pairs back from the host."""
        for group in _grouped(pairs):
            targets = self._index([target for _, target in group])
            for part, host in zip(self._parts, self._host_parts, strict=True):
                gathered = torch.empty((len(group), *host.shape[1:]), dtype=part.dtype, device=self.device)
                for first, source, count in _runs([source for source, _ in group]):
                    gathered[first : first + count].copy_(host[source : source + count], non_blocking=True)
                part.index_copy_(2, targets, gathered.movedim(0, 2))

    def _index(self, blocks: list[int]) -> Tensor:
        # Pinned, so that the host does not wait for the running step.
        return torch.tensor(blocks, pin_memory=self.device.type == "cuda").to(self.device, non_blocking=True)


def _grouped(pairs: Pairs) -> Iterator[Pairs]:
    for first in range(0, len(pairs), _GATHERED_BLOCKS):
        yield pairs[first : first + _GATHERED_BLOCKS]


def _runs(blocks: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (index of the first, its number, length) of each run of consecutive blocks."""
    first = 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or blocks[index] != blocks[index - 1] + 1:
            yield first, blocks[first], index - first
            first = index
