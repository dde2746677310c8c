"""Masks without a tensor: causal ones, windows, and variable-length sequences in one row."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


class AttentionBias:
    """A mask that is not stored as a tensor."""

    causal = False
    from_bottom_right = False


class LowerTriangularMask(AttentionBias):
    """A causal mask: every query sees the keys up to its position."""

    causal = True

    def __init__(self, *_: object, **__: object) -> None:
        """Ignore all arguments, such as the device."""


class LowerTriangularFromBottomRightMask(AttentionBias):
    """A causal mask aligned to the last query, which sees every key."""

    causal = from_bottom_right = True


@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """A causal mask aligned to the last query, with a window of keys."""

    _window_size: int


@dataclass
class LocalAttentionFromBottomRightMask(AttentionBias):
    """A window of keys to the left and right."""

    window_left: int
    window_right: int


@dataclass
class _SeqLenInfo:
    """The start positions of sequences in a row, on the device and on the host."""

    seqstart: Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]

    @classmethod
    def from_seqlens(cls, seqlens: Iterable[int], *, device: torch.device | str | None = None) -> "_SeqLenInfo":
        """Compute the start positions from lengths."""
        lengths = list(seqlens)
        starts = [*accumulate(lengths, initial=0)]
        place = device or ("cuda" if torch.cuda.is_available() else "cpu")
        return cls(torch.tensor(starts, dtype=torch.int32, device=place), max(lengths), min(lengths), starts)


@dataclass
class BlockDiagonalMask(AttentionBias):
    """A mask in which every sequence of a row sees only itself."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _SeqLenInfo
    _batch_sizes: Sequence[int] | None = None

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqlen: Sequence[int] | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> "BlockDiagonalMask":
        """Make the mask from sequence lengths; keys have the same lengths by default."""
        queries = _SeqLenInfo.from_seqlens(q_seqlen, device=device)
        same = kv_seqlen is None or list(kv_seqlen) == list(q_seqlen)
        return cls(queries, queries if same else _SeqLenInfo.from_seqlens(kv_seqlen or (), device=device))

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> tuple["BlockDiagonalMask", Tensor]:
        """Make the mask for tensors of shape (batch, length, ...), and return it with the tensors in one row."""
        lengths = [t.shape[1] for t in tensors for _ in range(t.shape[0])]
        mask = cls.from_seqlens(lengths, device=tensors[0].device)
        mask._batch_sizes = [t.shape[0] for t in tensors]
        return mask, torch.cat([t.reshape(1, -1, *t.shape[2:]) for t in tensors], dim=1)

    def split(self, row: Tensor) -> list[Tensor]:
        """Split a row into the tensors that it was made of."""
        starts, parts, at = self.q_seqinfo.seqstart_py, [], 0
        for size in self._batch_sizes or [1] * (len(starts) - 1):
            parts.append(row[:, starts[at] : starts[at + size]].reshape(size, -1, *row.shape[2:]))
            at += size
        return parts

    def make_causal(self) -> "BlockDiagonalCausalMask":
        return BlockDiagonalCausalMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_causal_from_bottomright(self) -> "BlockDiagonalCausalFromBottomRightMask":
        """Return a causal version in which the last query of each sequence sees all of its keys."""
        return BlockDiagonalCausalFromBottomRightMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)


@dataclass
class BlockDiagonalCausalMask(BlockDiagonalMask):
    """A causal mask within each sequence."""

    causal = True


@dataclass
class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """A causal mask within each sequence, aligned to its last query."""

    causal = from_bottom_right = True


@dataclass
class _PaddedSeqLenInfo(_SeqLenInfo):
    """Sequences in a cache with equal space for each."""

    seqlen: Tensor
    padding: int


@dataclass
class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalMask):
    """A causal mask on a padded cache, aligned to the last query of each sequence; for inference."""

    causal = from_bottom_right = True

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], causal_diagonal: None = None, *,
        device: torch.device | str | None = None,
    ) -> "BlockDiagonalCausalWithOffsetPaddedKeysMask":  # fmt: skip
        """Make the mask from query and key lengths, with keys in slots of `kv_padding` each."""
        queries = _SeqLenInfo.from_seqlens(q_seqlen, device=device)
        places = _SeqLenInfo.from_seqlens([kv_padding] * len(kv_seqlen), device=device)
        lengths = torch.tensor(list(kv_seqlen), dtype=torch.int32, device=places.seqstart.device)
        keys = _PaddedSeqLenInfo(
            places.seqstart, max(kv_seqlen), min(kv_seqlen), places.seqstart_py, lengths, kv_padding
        )
        return cls(queries, keys)
