"""What a mean over targets divides by is read from the call, and counted in the batch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tonnage.errors import RequestError
from tonnage.fit.denominators import LossCalls, RecordedLosses, TargetAmount, TargetMean, target_weightings

LOGITS = torch.zeros(4, 3)
TARGETS = torch.tensor([0, 1, 2, 255])
WEIGHTS = torch.tensor([1.0, 2.0, 4.0])


def recorded(**arguments: Any) -> LossCalls:
    with RecordedLosses() as losses:
        F.cross_entropy(LOGITS, **{"target": TARGETS.clamp(max=2), **arguments})
    return losses.calls


def test_the_arguments_of_a_mean_are_recorded_once() -> None:
    with RecordedLosses() as losses:
        nn.CrossEntropyLoss(WEIGHTS, ignore_index=255)(LOGITS, TARGETS)
        F.nll_loss(LOGITS, TARGETS, WEIGHTS.clone(), None, 255)
        F.cross_entropy(LOGITS, TARGETS, ignore_index=255)
    weighted, plain = losses.calls.means
    assert torch.equal(weighted.class_weights, WEIGHTS)
    assert plain.class_weights is None
    assert losses.calls.ignored == {-100, 255}
    assert losses.calls.explain_denominator


@pytest.mark.parametrize(
    ("arguments", "means", "is_explained"),
    [
        ({}, 1, True),
        ({"reduction": "sum"}, 0, True),
        ({"reduction": "none"}, 0, False),
        ({"size_average": False}, 0, False),
        ({"target": torch.full((4, 3), 1 / 3), "weight": WEIGHTS}, 0, False),
    ],
)
def test_only_means_over_classes_have_a_denominator(arguments: dict[str, Any], means: int, is_explained: bool) -> None:
    calls = recorded(**arguments)
    assert (len(calls.means), calls.explain_denominator) == (means, is_explained)


def test_outside_nothing_is_recorded() -> None:
    with RecordedLosses() as losses:
        pass
    F.cross_entropy(LOGITS, TARGETS, ignore_index=255)
    assert losses.calls == LossCalls()


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_an_amount_is_what_torch_divides_by(weights: Tensor | None) -> None:
    losses = torch.tensor([[0.1, 0.7, 0.2], [0.3, 0.3, 0.4], [0.2, 0.2, 0.6], [0.5, 0.3, 0.2]]).log()
    arguments: Any = {"weight": weights, "ignore_index": 255}
    total = F.nll_loss(losses, TARGETS, reduction="sum", **arguments)
    amount = TargetAmount(TargetMean(weights, 255), "y")({"y": TARGETS})
    torch.testing.assert_close(F.nll_loss(losses, TARGETS, **arguments), (total / amount).float())


def test_tensors_that_cannot_be_targets_are_not_proposed() -> None:
    batch = {
        "ids": torch.tensor([[7, 8], [9, 9]]),
        "seen": torch.tensor([True, False]),
        "scale": torch.ones(2),
        "kinds": torch.tensor([0, 1]),
        "labels": torch.tensor([[1, 2], [255, 0]]),
    }
    proposed = [str(weighting) for weighting in target_weightings(batch, [TargetMean(WEIGHTS, 255)])]
    assert proposed == ["class weights of labels", "class weights of labels, shifted", "class weights of kinds"]
    assert [*target_weightings(batch, [TargetMean(None, -100)])] == []
    assert [*target_weightings({"y": batch["kinds"]}, [TargetMean(None, 0)])] == ["nonzero:y"]


def test_a_batch_without_the_tensor_is_an_error_in_words() -> None:
    with pytest.raises(RequestError, match="'y', and the batch holds none of that name") as caught:
        TargetAmount(TargetMean(WEIGHTS, 255), "y")({"x": LOGITS})
    assert "It holds x" in caught.value.hint
