"""One forward pass as tensors: the contract between runner, models and kernels.

Tokens are flat: one of each decoding sequence, then the prompt chunks. A padding row has length 0 and the null block.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class Batch:
    """D decoding rows, P chunks, T = D + tokens of all chunks, S rows that sample a token."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T]: block × block size + offset, where this token's key and value go
    decodes: int  # D
    tables: Tensor  # int32 [D + P, most blocks]: block numbers, 0 (the null block) beyond the sequence's own
    lengths: Tensor  # int32 [D + P]: keys that the row sees, including those of this pass; 0 for padding
    chunk_starts: Tensor  # int32 [P + 1]: start of each chunk among the tokens after D; the first is 0
    longest_chunk: int  # known on the host; 0 if P is 0
    samples: Tensor | None = None  # int64 [S]: which of the T rows sample a token; None if all do
    order: Tensor | None = None  # int32 [D]: the decoding rows, those with the most keys first


@dataclass(slots=True)
class LayerCache:
    """The pages of one layer: views into the cache's tensor. Scales are set if it is FP8."""

    keys: Tensor  # [blocks, block size, KV heads, head dim]
    values: Tensor  # the same
    key_scales: Tensor | None = None  # bfloat16 [blocks, block size, KV heads]; key = stored key × its scale
    value_scales: Tensor | None = None

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.keys.shape[1]
