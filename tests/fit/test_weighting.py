"""How much parts of a batch weigh is found by gradients, or the batch is not divided."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchvision_names  # noqa: F401

# isort: split
from transformers import MixtralConfig, MixtralForCausalLM

from fit.cases import Case, build_training
from tonnage.fit.stepping.step import take_step
from tonnage.fit.technique import NotApplicable
from tonnage.fit.techniques.micro_batches import MicroBatches
from tonnage.fit.weighting import find_weighting, unlike_rows

Batch = dict[str, Any]


class Tagger(nn.Module):
    """Scores for each token of a sequence."""

    def __init__(self, classes: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 12)
        self.mix = nn.Linear(12, 12)
        self.head = nn.Linear(12, classes)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(ids)).cumsum(1)))


def tagging(loss: Callable[[nn.Module, Batch], Tensor], **more: Any) -> Callable[[], Case]:
    def build() -> Case:
        ids = torch.randint(1, 32, (6, 10))
        return Tagger(), {"ids": ids, "labels": torch.randint(1, 7, (6, 10)), **more}, loss

    return build


def scores(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    return model(batch["ids"]).flatten(0, 1), batch["labels"].flatten()


def class_weighted(model: nn.Module, batch: Batch) -> Tensor:
    weights = torch.arange(1.0, 8.0, dtype=torch.float64)
    return F.cross_entropy(*scores(model, batch), weight=weights)


CLASS_WEIGHTS = torch.tensor([0.1, 1.0, 5.0, 20.0, 0.5, 3.0, 8.0], dtype=torch.float64)


def rare_classes() -> Tensor:
    """Labels of which the first rows have one class only."""
    labels = torch.ones(6, 10, dtype=torch.long)
    labels[4, 3:] = 3
    labels[5, 5:8] = 6
    return labels


def weighted_by_hand(model: nn.Module, batch: Batch) -> Tensor:
    logits, labels = scores(model, batch)
    class_weights = CLASS_WEIGHTS[labels]
    return (F.cross_entropy(logits, labels, reduction="none") * class_weights).sum() / class_weights.sum()


def rare_kinds() -> Case:
    """One label a row, and the same one in the first rows."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        losses = F.cross_entropy(model(batch["x"]), batch["labels"], reduction="none")
        class_weights = CLASS_WEIGHTS[batch["labels"]]
        return (losses * class_weights).sum() / class_weights.sum()

    labels = torch.tensor([0] * 9 + [2, 3, 3])
    return nn.Linear(8, 7), {"x": torch.randn(12, 8, dtype=torch.float64), "labels": labels}, loss


def penalised_sum(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(*scores(model, batch), reduction="sum") + 5 * model.mix.weight.square().sum()


def across_rows(model: nn.Module, batch: Batch) -> Tensor:
    means = model(batch["ids"]).mean(1)
    return F.cross_entropy(means @ means.T, torch.arange(len(means)))


def mixtral() -> Case:
    config = MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.05,
    )  # fmt: skip
    ids = torch.randint(0, 32, (6, 10))
    return MixtralForCausalLM(config), {"input_ids": ids, "labels": ids}, lambda model, batch: model(**batch).loss


@pytest.mark.parametrize(
    "build",
    [
        tagging(weighted_by_hand),
        rare_kinds,
        tagging(penalised_sum),
        tagging(across_rows),
        mixtral,
    ],
    ids=[
        "class weights by hand",
        "class weights by hand, rare classes",
        "a penalty beside a sum",
        "rows against each other",
        "auxiliary loss of a router",
    ],
)
def test_a_loss_that_is_no_sum_of_rows_is_not_divided(build: Callable[[], Case]) -> None:
    # Mixtral's experts have no kernel for FP64.
    training = build_training(build, dtype=torch.float32 if build is mixtral else torch.float64)
    with pytest.raises(NotApplicable, match=r"No known weighting"):
        find_weighting(training)
    before = training.micro_batches, training.weighting
    with pytest.raises(NotApplicable):
        MicroBatches(count=2).apply(training)
    assert (training.micro_batches, training.weighting) == before


def ignoring_zero(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(*scores(model, batch), ignore_index=0)


def masked(model: nn.Module, batch: Batch) -> Tensor:
    losses = F.cross_entropy(*scores(model, batch), reduction="none").view_as(batch["labels"])
    return (losses * batch["mask"]).sum() / batch["mask"].sum()


def nested(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["goal"]["tags"].flatten())


def weighted_rows(model: nn.Module, batch: Batch) -> Tensor:
    losses = F.cross_entropy(*scores(model, batch), reduction="none").view_as(batch["labels"]).mean(1)
    return (losses * batch["importance"]).sum() / batch["importance"].sum()


def void_pixels(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(*scores(model, batch), ignore_index=255)


def labels_with_void() -> Tensor:
    labels = torch.randint(1, 7, (6, 10), generator=torch.Generator().manual_seed(2))
    labels[4, 2:] = 255
    return labels


def smoothed_rare_classes(model: nn.Module, batch: Batch) -> Tensor:
    criterion = nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, ignore_index=0, label_smoothing=0.1)
    return criterion(*scores(model, batch))


def weighted_next_token(model: nn.Module, batch: Batch) -> Tensor:
    log_probabilities = model(batch["ids"])[:, :-1].log_softmax(-1)
    return F.nll_loss(log_probabilities.flatten(0, 1), batch["labels"][:, 1:].flatten(), weight=CLASS_WEIGHTS)


def positives_count_more(model: nn.Module, batch: Batch) -> Tensor:
    targets = F.one_hot(batch["labels"], 7).double()
    return F.binary_cross_entropy_with_logits(model(batch["ids"]), targets, pos_weight=CLASS_WEIGHTS)


def weighted_sum(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(*scores(model, batch), weight=CLASS_WEIGHTS, reduction="sum")


def tags() -> Tensor:
    made = torch.randint(0, 7, (6, 10), generator=torch.Generator().manual_seed(1))
    for row in range(6):
        made[row, : row + 1] = -100
    return made


FOUND = {
    "padding with zeros": (tagging(ignoring_zero), "nonzero:labels"),
    "full masks": (tagging(masked, mask=torch.ones(6, 10)), "nonzero:mask"),
    "labels inside": (tagging(nested, goal={"tags": tags()}), "tokens:goal.tags"),
    "weights of rows": (tagging(weighted_rows, importance=torch.rand(6, dtype=torch.float64)), "total:importance"),
    "a plain mean": (tagging(lambda model, batch: F.cross_entropy(*scores(model, batch))), "tokens"),
    "class weights": (tagging(class_weighted), "class weights of labels"),
    "class weights, rare classes": (tagging(class_weighted, labels=rare_classes()), "class weights of labels"),
    "class weights, smoothed": (tagging(smoothed_rare_classes), "class weights of labels"),
    "class weights, shifted": (tagging(weighted_next_token), "class weights of labels, shifted"),
    "class weights, a sum": (tagging(weighted_sum), "sum"),
    "weights of positives": (tagging(positives_count_more), "tokens"),
    "an ignored label of its own": (tagging(void_pixels, labels=labels_with_void()), "targets of labels"),
    "a sum": (tagging(lambda model, batch: F.cross_entropy(*scores(model, batch), reduction="sum")), "sum"),
}


@pytest.mark.parametrize(("build", "weighting"), FOUND.values(), ids=FOUND)
def test_a_weighting_is_found_and_holds_on_batches_with_other_padding(
    build: Callable[[], Case], weighting: str
) -> None:
    plain, fitted = (build_training(build) for _ in range(2))
    MicroBatches(count=3).apply(fitted)
    assert str(fitted.weighting) == weighting
    for step in range(5):
        batch = dict(plain.sample)
        if "class weights" in weighting:
            batch["labels"] = batch["labels"].roll(step, 0).where(torch.arange(10) < 8, torch.full((), 3))
        if "mask" in batch:
            batch["mask"] = (torch.arange(10) < torch.arange(2, 8)[:, None] + step % 2).double()
        if weighting == "nonzero:labels":
            batch["labels"] = batch["labels"] * (torch.arange(10) < torch.arange(3, 9)[:, None])
        torch.testing.assert_close(take_step(fitted, batch), take_step(plain, batch), rtol=1e-9, atol=1e-9)
    for expected, found in zip(plain.model.parameters(), fitted.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_a_buffer_that_each_forward_pass_changes_keeps_the_batch_whole() -> None:
    def build() -> Case:
        model, batch, loss = tagging(class_weighted)()
        nn.utils.parametrizations.spectral_norm(model.mix)
        return model, batch, loss

    with pytest.raises(NotApplicable, match="changes in each forward pass"):
        find_weighting(build_training(build))


def test_rows_that_are_tried_go_from_the_fewest_labels_to_the_most() -> None:
    labels = torch.zeros(8, 6, dtype=torch.long)
    for row in range(8):
        labels[row, row // 2 + 1 :] = -100
    chosen = unlike_rows({"labels": labels}, 4)
    counts = [int((labels[row] != -100).sum()) for row in chosen]
    assert len(set(chosen)) == 4
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (2, 4)
    assert unlike_rows({"x": torch.zeros(3, 2)}, 4) == [0, 1, 2]


def test_entries_of_a_row_go_with_it() -> None:
    from tonnage.fit.stepping.batches import split

    batch = {"x": torch.arange(4.0)[:, None], "names": ["a", "b", "c", "d"], "sizes": [(1, 2), (3, 4)], "level": "high"}
    first, second = (part.batch for part in split(batch, 2))
    assert (first["names"], second["names"]) == (["a", "b"], ["c", "d"])
    assert first["sizes"] == second["sizes"] == [(1, 2), (3, 4)]
    assert second["level"] == "high"


def test_rows_that_are_tried_have_different_classes() -> None:
    labels = torch.tensor([0] * 12 + [1, 2, 2, 5, -100])
    assert unlike_rows({"labels": labels}, 4) == [0, 12, 13, 15]
    assert unlike_rows({"labels": labels}, 2) == [0, 15]
    assert unlike_rows({"labels": labels}, 6) == [0, 1, 2, 12, 13, 15]
    assert unlike_rows({"labels": labels}, 2, {2, 5, -100}) == [0, 12]


def test_a_weighting_of_a_plan_is_tried_first_and_dropped_if_it_does_not_hold() -> None:
    training = build_training(tagging(lambda model, batch: F.cross_entropy(*scores(model, batch))))
    assert find_weighting(training, first="rows") == "rows"
    assert find_weighting(training, first="nonzero:mask") == "tokens"
    assert str(find_weighting(build_training(tagging(class_weighted)), first="tokens")) == "class weights of labels"
