from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import torchvision_names  # noqa: F401

# isort: split
from transformers import BatchEncoding

from fit.cases import CASES, build_training
from tonnage.fit.stepping.batches import BadBatch, batch_rows, find_labels, split, tensors

Pair = namedtuple("Pair", "tokens labels")


@dataclass
class Images:
    pixels: Tensor
    labels: Tensor
    scale: float = 2.0


def _label_rows(rows: int, length: int = 7, ignored: int = 0) -> Tensor:
    labels = torch.randint(0, 5, (rows, length), generator=torch.Generator().manual_seed(rows))
    labels[0, :ignored] = -100
    return labels


@given(rows=st.integers(1, 9), parts=st.integers(1, 9))
def test_parts_together_are_the_batch(rows: int, parts: int) -> None:
    batch = {"x": torch.arange(rows * 3).view(rows, 3), "labels": _label_rows(rows)}
    found = [part.batch for part in split(batch, parts)]
    assert len(found) == min(rows, parts)
    assert torch.equal(torch.cat([part["x"] for part in found]), batch["x"])
    sizes = [batch_rows(part) for part in found]
    assert max(sizes) - min(sizes) <= 1


@given(
    counted=st.lists(st.integers(0, 6), min_size=1, max_size=8).filter(any),
    parts=st.integers(1, 8),
    shifted=st.booleans(),
)
def test_weighted_means_over_tokens_make_the_whole_mean(counted: list[int], parts: int, shifted: bool) -> None:
    labels = torch.full((len(counted), 7), -100)
    for row, count in enumerate(counted):
        labels[row, 7 - count :] = row % 3
    logits = torch.randn(len(counted), 7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    batch = {"logits": logits, "labels": labels}
    skipped = 1 if shifted else 0

    def loss(batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(
            batch["logits"][:, skipped:].flatten(0, 1), batch["labels"][:, skipped:].flatten()
        )

    weighting = "shifted-tokens" if shifted else "tokens"
    total = sum(part.weigh(loss(part.batch)) for part in split(batch, parts, weighting))
    torch.testing.assert_close(total, loss(batch), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("parts", [2, 3, 4])
@pytest.mark.parametrize(
    ("case", "weighting"),
    [("llama", "shifted-tokens"), ("gpt2", "shifted-tokens"), ("vit", "rows"), ("dropout", "rows")],
)
def test_weighted_losses_make_the_loss_of_real_models(case: str, weighting: str, parts: int) -> None:
    training = build_training(CASES[case])
    training.model.eval()
    labels = find_labels(training.sample)
    assert labels is not None
    if labels.ndim == 2 and weighting != "rows":
        labels[0, :8] = -100
    whole = training.loss(training.model, training.sample)
    pieces = split(training.sample, parts, weighting)
    total = sum(part.weigh(training.loss(training.model, part.batch)) for part in pieces)
    torch.testing.assert_close(total, whole, rtol=1e-10, atol=1e-10)


def test_a_part_without_labels_adds_neither_loss_nor_gradient() -> None:
    logits = torch.randn(2, 7, 5, requires_grad=True)
    labels = _label_rows(2, ignored=7)
    for part in split({"logits": logits, "labels": labels}, 2, "tokens"):
        loss = nn.functional.cross_entropy(part.batch["logits"].flatten(0, 1), part.batch["labels"].flatten())
        part.weigh(loss).backward()
    assert logits.grad is not None
    assert torch.equal(logits.grad[0], torch.zeros(7, 5))
    assert logits.grad[1].abs().sum() > 0


@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.zeros(4, 2), "labels": _label_rows(4), "mask": None, "kind": "text"},
        OrderedDict(x=torch.zeros(4, 2), labels=_label_rows(4)),
        BatchEncoding({"x": torch.zeros(4, 2), "labels": _label_rows(4)}),
        (torch.zeros(4, 2), _label_rows(4)),
        [torch.zeros(4, 2), _label_rows(4)],
        Pair(torch.zeros(4, 2), _label_rows(4)),
        Images(torch.zeros(4, 2), _label_rows(4)),
        {"inside": {"x": torch.zeros(4, 2)}, "labels": _label_rows(4)},
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_nestings_keep_their_kind(batch: object) -> None:
    first, second = split(batch, 2, "tokens")
    assert type(first.batch) is type(batch)
    assert [tensor.shape[0] for part in (first, second) for tensor in tensors(part.batch)] == [2, 2, 2, 2]
    assert batch_rows(batch) == 4


def test_what_has_no_rows_is_shared() -> None:
    positions, scale = torch.arange(7).view(1, 7), torch.tensor(3)
    batch = {"x": torch.zeros(4, 7), "labels": _label_rows(4), "positions": positions, "scale": scale, "name": "a"}
    for part in split(batch, 2):
        assert part.batch["positions"] is positions
        assert part.batch["scale"] is scale
        assert part.batch["name"] == "a"


def test_parts_are_views() -> None:
    batch = torch.zeros(4, 2)
    split(batch, 2)[1].batch.fill_(1)
    assert batch.sum() == 4


def test_a_sum_weighs_one_and_a_function_is_asked() -> None:
    batch = {"x": torch.arange(4.0)}
    assert [part.weight for part in split(batch, 2, "sum")] == [1.0, 1.0]
    assert [float(part.weight) for part in split(batch, 2, lambda part: part["x"].sum())] == pytest.approx(
        [1 / 6, 5 / 6]
    )


def test_a_batch_without_rows_is_refused() -> None:
    with pytest.raises(BadBatch, match="no tensor with rows"):
        split({"x": torch.tensor(1), "name": "a"}, 2)


def test_tokens_without_labels_are_refused() -> None:
    with pytest.raises(BadBatch, match="integer labels"):
        split({"x": torch.zeros(4, 2)}, 2, "tokens")
