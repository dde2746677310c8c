"""Build batches of other sizes than the sample by repeating its rows or the tokens of its rows.

The values do not affect memory; shapes and dtypes do. This module does not know what a step costs.
"""

import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from tonnage.errors import RequestError
from tonnage.fit.stepping.batches import BadBatch, batch_rows, change_tensors, take_rows, tensors
from tonnage.fit.training import Batch

# Names that models give learned position embeddings: wpe, pos_embed, embed_positions, positional_embedding.
_POSITIONS = re.compile(r"(^|[._])(wpe|pos(ition(al|s)?)?(_?(emb|enc)\w*)?)(\.weight)?$")
_FIRST_TOKENS = 256


class Axis(ABC):
    """A dimension along which a batch can grow, in multiples of `smallest`, up to `largest` unless that is None."""

    noun: ClassVar[str]
    degree: ClassVar[int]  # the highest power of the size that memory may grow with

    def __init__(self, sample: Batch, multiple_of: int, at_most: int | None) -> None:
        if multiple_of < 1:
            raise RequestError("multiple_of is less than 1.", hint="Give a whole number from 1 up.")
        if at_most is not None and at_most < multiple_of:
            raise RequestError(
                f"No multiple of {multiple_of} {self.noun} is at most {at_most}.", hint="Give a smaller multiple_of."
            )
        self.sample, self.smallest = sample, multiple_of
        self.largest = None if at_most is None else self.down(at_most)

    def down(self, size: int) -> int:
        """Round a size down to a multiple of `smallest`."""
        return size - size % self.smallest

    @abstractmethod
    def grow(self, size: int) -> Batch:
        """Return a batch of this size."""

    @abstractmethod
    def first_sizes(self) -> list[int]:
        """Return small sizes to measure first: `degree + 1` of them where the limit allows."""

    def _up_to_the_end(self, sizes: list[int]) -> list[int]:
        return [size for size in sizes if self.largest is None or size <= self.largest] or [self.smallest]


class Rows(Axis):
    """Grow a batch by rows, equally many per micro-batch: uneven micro-batches would fragment the memory."""

    noun, degree = "rows", 1

    def __init__(self, sample: Batch, multiple_of: int, at_most: int | None, *, micro_batches: int) -> None:
        self.rows = batch_rows(sample)
        super().__init__(sample, math.lcm(max(0, multiple_of), micro_batches), at_most)

    def grow(self, size: int) -> Batch:
        return take_rows(self.sample, [row % self.rows for row in range(size)])

    def first_sizes(self) -> list[int]:
        return self._up_to_the_end([self.smallest, 2 * self.smallest])


class Tokens(Axis):
    noun, degree = "tokens", 2

    def __init__(
        self, sample: Batch, multiple_of: int, at_most: int | None, *, dimension: int, model: nn.Module
    ) -> None:
        self.dimension = dimension
        self.length = sequence_length(sample, dimension)
        ends = [end for end in (at_most, learnt_positions(model)) if end is not None]
        super().__init__(sample, multiple_of, min(ends, default=None))

    def grow(self, size: int) -> Batch:
        def repeat(tensor: Tensor) -> Tensor:
            if tensor.ndim <= self.dimension or tensor.shape[self.dimension] != self.length:
                return tensor
            return tensor.index_select(self.dimension, torch.arange(size, device=tensor.device) % self.length)

        grown = change_tensors(self.sample, repeat)
        if isinstance(grown, Mapping) and isinstance(positions := grown.get("position_ids"), Tensor):
            positions.copy_(torch.arange(size, device=positions.device))  # repeated ids would start new documents
        return grown

    def first_sizes(self) -> list[int]:
        unit = max(self.smallest, self.down(_FIRST_TOKENS))
        if self.largest is not None:
            unit = max(self.smallest, min(unit, self.down(self.largest // 3)))
        return self._up_to_the_end([unit, 2 * unit, 3 * unit])


def sequence_length(sample: Batch, dimension: int) -> int:
    """Return the most common size of this dimension among tensors of [rows, tokens] or [rows, tokens, features]."""
    if dimension < 1:
        raise RequestError(f"dimension is {dimension}.", hint="Dimension 0 is the batch; the sequence is after it.")
    lengths = Counter(tensor.shape[dimension] for tensor in tensors(sample) if dimension < tensor.ndim <= 3)
    length = max(lengths, key=lengths.__getitem__, default=0)
    if not length:
        raise BadBatch(
            f"The sample holds no tensor with a sequence in dimension {dimension}.",
            hint="Give tensors of [rows, tokens] or [rows, tokens, features], or name the dimension.",
        )
    for tensor in tensors(sample):
        if tensor.ndim > 3 and length in tensor.shape[2:]:
            raise BadBatch(
                f"A tensor of {list(tensor.shape)} has the {length} tokens in more than one dimension or in another one.",
                hint="Give an attention mask of [rows, tokens], or make the larger one inside loss=.",
            )
    return length


def learnt_positions(model: nn.Module) -> int | None:
    """Return the number of tokens that learned position embeddings allow, or None if the model has none."""
    limits = []
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and _POSITIONS.search(name) and "relative" not in name:
            # The padding position and those before it are unused.
            padding = getattr(model.get_submodule(name.rpartition(".")[0]), "padding_idx", None)
            limits.append(parameter.shape[-2] - (0 if padding is None else padding + 1))
    declared = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if limits and isinstance(declared, int):
        limits.append(declared)
    return min(limits, default=None)
