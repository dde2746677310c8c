"""What a training of the zoo is made of, and the small parts that several of them share."""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import torchvision_names  # noqa: F401

Batch = Any
Loss = Callable[[nn.Module, Batch], Tensor]

# Of sizes: 1 where a step's numbers are looked at, more where its bytes are (`virtual_zoo`).
SCALE = int(os.environ.get("ZOO_SCALE", "1"))
ROWS, LENGTH, WIDTH, CLASSES, VOCABULARY = 4, 8 * SCALE, 8 * SCALE, 5, 24 * SCALE


@dataclass
class Case:
    """A training as someone has it. The first batch is the sample; steps take them in turn."""

    model: nn.Module
    optimizer: Optimizer
    loss: Loss
    batches: list[Batch]
    clip_norm: float | None = None
    after_fit: Callable[[], None] | None = None  # what is done with a model that was fitted, before the first step
    after_step: Callable[[], None] | None = None  # a scheduler's step, an average over steps
    also: Callable[[], Any] = tuple  # tensors and numbers to compare beside parameters and buffers


KINDS: dict[str, Callable[[], Case]] = {}


def kind(build: Callable[[], Case]) -> Callable[[], Case]:
    """Enter a training into the zoo under its own name, the same at each call."""

    def seeded() -> Case:
        seed(0)
        return build()

    KINDS[build.__name__.replace("_", " ")] = seeded
    return seeded


def seed(number: int) -> None:
    torch.default_generator.manual_seed(number)  # of the CPU alone, which is quick
    random.seed(number)
    np.random.seed(number)


def case(model: nn.Module, loss: Loss, batches: list[Batch], **more: Any) -> Case:
    """In FP64 and training mode, with AdamW unless told otherwise."""
    model.double().train()
    make = more.pop("optimizer", adamw)
    return Case(model, make(model.parameters()), loss, batches, **more)


def seen(built: Case) -> Case:
    """After a first look: transformers puts hooks of its own on a model when it first runs."""
    with torch.no_grad(), fp64_everywhere():
        built.loss(built.model, built.batches[0])
    return built


def adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-3)


@contextmanager
def fp64_everywhere() -> Iterator[None]:
    """Libraries compute norms, softmax and losses in FP32 whatever the model's type; not inside here."""
    to, softmax = Tensor.to, nn.functional.softmax

    def widen(tensor: Tensor) -> Tensor:
        return tensor if tensor.dtype == torch.float64 else to(tensor, torch.float64)

    def move(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if tensor.dtype == torch.float64:
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            kwargs |= {"dtype": torch.float64} if kwargs.get("dtype") is torch.float32 else {}
        return to(tensor, *args, **kwargs)

    def wide_softmax(scores: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Tensor:
        narrows = scores.dtype == torch.float64 and dtype == torch.float32
        return softmax(scores, dim, _stacklevel, None if narrows else dtype)

    with (
        mock.patch.object(Tensor, "float", widen),
        mock.patch.object(Tensor, "to", move),
        mock.patch.object(nn.functional, "softmax", wide_softmax),
    ):
        yield


# Batches --------------------------------------------------------------------------------------------------------------


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def several(make: Callable[[int], Batch]) -> list[Batch]:
    """Two full batches, and the smaller one that ends an epoch."""
    return [make(ROWS), make(ROWS), make(ROWS - 1)]


def vectors(rows: int) -> dict[str, Tensor]:
    return {"x": randn(rows, WIDTH), "y": torch.randint(0, CLASSES, (rows,))}


def sequences(rows: int) -> dict[str, Tensor]:
    return {"x": randn(rows, LENGTH, WIDTH), "y": torch.randint(0, CLASSES, (rows, LENGTH))}


def images(rows: int, size: int = 8, classes: int = CLASSES) -> dict[str, Tensor]:
    return {"x": randn(rows, 3, size, size), "y": torch.randint(0, classes, (rows,))}


def ids(rows: int, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, length))


def text(rows: int) -> dict[str, Tensor]:
    """Padded on the right, as a tokenizer gives it, each row to a length of its own; labels are -100 there."""
    tokens, lengths = ids(rows), torch.randint(3, LENGTH + 1, (rows,))
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    tokens = tokens * mask
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


# Models and losses ----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block, as many a model is made of."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.mlp(self.norm(x)))


class Tower(nn.Module):
    """Blocks between a first layer and a head wide enough to be taken for a vocabulary's."""

    def __init__(self, outputs: int = CLASSES, *, block: Callable[[], nn.Module] = Block, depth: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, outputs)

    def features(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class Embedded(nn.Module):
    """A language model of the same blocks, by hand: tokens in, logits over the vocabulary out."""

    def __init__(self, *, block: Callable[[], nn.Module] = Block, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def classify(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy over the last dimension of what the model makes of `x`."""
    return nn.functional.cross_entropy(model(batch["x"]).flatten(0, -2), batch["y"].flatten())


def next_token(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), **options)


def language(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Next tokens of a model by hand."""
    return next_token(model(batch["input_ids"]), batch["labels"])
