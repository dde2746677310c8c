"""Losses: what people average over, mask, weigh, add and compare."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fit.zoo.building import (
    CLASSES,
    LENGTH,
    ROWS,
    WIDTH,
    Block,
    Case,
    Embedded,
    Tower,
    case,
    classify,
    ids,
    kind,
    language,
    next_token,
    randn,
    sequences,
    several,
    text,
    vectors,
)

# Means over something -------------------------------------------------------------------------------------------------


@kind
def plain_cross_entropy() -> Case:
    return case(Tower(), classify, several(vectors))


@kind
def sum_over_rows() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")

    return case(Tower(), loss, several(vectors))


@kind
def class_weighted_cross_entropy() -> Case:
    """Divided by the weights of the classes that occur, not by rows."""
    weights = torch.linspace(0.2, 3, CLASSES).double()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"], weight=weights)

    return case(Tower(), loss, several(vectors))


@kind
def zero_is_the_ignored_label() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return next_token(model(batch["input_ids"]), batch["input_ids"], ignore_index=0)

    return case(Embedded(), loss, several(text))


@kind
def label_smoothing() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return next_token(model(batch["input_ids"]), batch["labels"], label_smoothing=0.1)

    return case(Embedded(), loss, several(text))


@kind
def rows_that_ignore_all_their_labels() -> Case:
    """Every batch has a row without a label."""

    def silent(rows: int) -> dict[str, Tensor]:
        batch = text(rows)
        batch["labels"][1] = -100
        return batch

    return case(Embedded(), language, several(silent))


def masked_mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits, targets, mask = model(batch["x"]), batch["y"], batch["mask"]
    each = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (each * mask.flatten()).sum() / mask.sum()


def with_mask(rows: int, *, full: bool) -> dict[str, Tensor]:
    mask = torch.ones(rows, LENGTH) if full else (torch.rand(rows, LENGTH) < 0.5).double()
    mask[:, 0] = 1
    return {**sequences(rows), "mask": mask.double()}


@kind
def mask_that_is_full_in_the_sample() -> Case:
    """Later batches leave tokens out, and a mean over rows is no longer the mean over the mask."""
    return case(
        Tower(), masked_mean, [with_mask(ROWS, full=True), with_mask(ROWS, full=False), with_mask(3, full=False)]
    )


@kind
def mask_that_is_thin_in_the_sample() -> Case:
    return case(Tower(), masked_mean, several(lambda rows: with_mask(rows, full=False)))


@kind
def labels_ignored_only_after_the_sample() -> Case:
    """The sample's labels all count; those of later batches do not."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["gold"].flatten())

    def thinned(rows: int, share: float) -> dict[str, Tensor]:
        batch = sequences(rows)
        ignored = torch.rand(rows, LENGTH) < share
        ignored[:, 0] = False
        return {"x": batch["x"], "gold": batch["y"].masked_fill(ignored, -100)}

    return case(Tower(), loss, [thinned(ROWS, 0), thinned(ROWS, 0.5), thinned(3, 0.7)])


@kind
def mean_of_the_means_of_rows() -> Case:
    """Long rows count as much as short ones."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits, labels = model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
        each = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return (each.sum(1) / (labels != -100).sum(1)).mean()

    return case(Embedded(), loss, several(text))


@kind
def weights_of_rows_in_the_batch() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        each = nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return (each * batch["weight"]).sum() / batch["weight"].sum()

    return case(Tower(), loss, several(lambda rows: {**vectors(rows), "weight": torch.rand(rows).double()}))


@kind
def mean_over_the_rows_of_some_classes() -> Case:
    """A count that no name in the batch tells of."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        each = nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        chosen = batch["y"] > 1
        return (each * chosen).sum() / chosen.sum().clamp(min=1)

    return case(Tower(), loss, several(vectors))


@kind
def root_of_a_mean_square() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.mse_loss(model(batch["x"]), batch["y"]).sqrt()

    return case(Tower(1), loss, several(numbers))


def numbers(rows: int) -> dict[str, Tensor]:
    return {"x": randn(rows, WIDTH), "y": randn(rows, 1)}


@kind
def regression() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.mse_loss(model(batch["x"]), batch["y"])

    return case(Tower(1), loss, several(numbers))


@kind
def binary_cross_entropy_of_probabilities() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return nn.BCELoss()(model(batch["x"]).sigmoid(), (batch["y"] > 0).double())

    return case(Tower(1), loss, several(numbers))


@kind
def binary_cross_entropy_with_positive_weights() -> Case:
    criterion = nn.BCEWithLogitsLoss(pos_weight=torch.linspace(1, 4, CLASSES).double())

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return criterion(model(batch["x"]), batch["y"])

    return case(
        Tower(), loss, several(lambda rows: {"x": randn(rows, WIDTH), "y": (randn(rows, CLASSES) > 0).double()})
    )


@kind
def focal_loss() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        each = nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return ((1 - (-each).exp()) ** 2 * each).mean()

    return case(Tower(), loss, several(vectors))


@kind
def focal_loss_divided_by_positives() -> Case:
    """As detectors have it: the sum over all, divided by how many labels are not background."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        each = nn.functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten(), reduction="none")
        return ((1 - (-each).exp()) ** 2 * each).sum() / (batch["y"] > 0).sum()

    return case(Tower(), loss, several(sequences))


def speech(rows: int) -> dict[str, Tensor]:
    return {
        "x": randn(rows, LENGTH, WIDTH),
        "y": torch.randint(1, CLASSES, (rows, 3)),
        "input_lengths": torch.randint(6, LENGTH + 1, (rows,)),
        "target_lengths": torch.randint(1, 4, (rows,)),
    }


@kind
def ctc() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        scores = model(batch["x"]).log_softmax(-1).transpose(0, 1)
        return nn.CTCLoss()(scores, batch["y"], batch["input_lengths"], batch["target_lengths"])

    return case(Tower(), loss, several(speech))


@kind
def ctc_with_targets_in_a_row() -> Case:
    """All targets one after another, as CTCLoss also takes them."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        scores = model(batch["x"]).log_softmax(-1).transpose(0, 1)
        return nn.CTCLoss()(scores, batch["targets"], batch["input_lengths"], batch["target_lengths"])

    def flat(rows: int) -> dict[str, Tensor]:
        batch = speech(rows)
        targets = torch.randint(1, CLASSES, (int(batch["target_lengths"].sum()),))
        return {"x": batch["x"], "targets": targets, **{n: batch[n] for n in ("input_lengths", "target_lengths")}}

    return case(Tower(), loss, several(flat))


# Of several parts -----------------------------------------------------------------------------------------------------


@kind
def penalty_on_parameters() -> Case:
    """A mean over rows and a term that does not depend on them."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return classify(model, batch) + 1e-2 * sum(p.square().sum() for p in model.parameters())

    return case(Tower(), loss, several(vectors))


@kind
def small_penalty_on_parameters() -> Case:
    """Below what a look at the loss of two rows would notice."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return classify(model, batch) + 1e-5 * sum(p.square().sum() for p in model.parameters())

    return case(Tower(), loss, several(vectors))


@kind
def several_tasks() -> Case:
    """A class of each row and a tag of some of its tokens: two means over different things."""

    class Tasks(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.tags = nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            features = self.features(x)
            return self.head(features.mean(1)), self.tags(features)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        classes, tags = model(batch["x"])
        by_token = nn.functional.cross_entropy(tags.flatten(0, 1), batch["tags"].flatten())
        return nn.functional.cross_entropy(classes, batch["labels"]) + 0.5 * by_token

    def both(rows: int) -> dict[str, Tensor]:
        batch = sequences(rows)
        tags = (batch["y"] % 3).masked_fill(torch.rand(rows, LENGTH) < 0.5, -100)
        tags[:, 0] = 1
        return {"x": batch["x"], "labels": batch["y"][:, 0], "tags": tags}

    return case(Tasks(), loss, several(both))


@kind
def distillation_from_a_teacher() -> Case:
    teacher = Tower().double().requires_grad_(False).eval()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["x"])
        soft = nn.functional.kl_div(
            (logits / 2).log_softmax(-1), (teacher(batch["x"]) / 2).softmax(-1), reduction="batchmean"
        )
        return 0.5 * nn.functional.cross_entropy(logits, batch["y"]) + 0.5 * 4 * soft

    return case(Tower(), loss, several(vectors))


@kind
def distillation_of_tokens_by_batchmean() -> Case:
    """`batchmean` divides by rows, the cross-entropy beside it by labels."""
    teacher = Embedded().double().requires_grad_(False).eval()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits, wanted = model(batch["input_ids"]), teacher(batch["input_ids"])
        soft = nn.functional.kl_div(logits.log_softmax(-1), wanted.softmax(-1), reduction="batchmean")
        return next_token(logits, batch["labels"]) + 0.1 * soft

    return case(Embedded(), loss, several(text))


# Rows against rows, gradients inside ----------------------------------------------------------------------------------


@kind
def triplets() -> Case:
    """Each anchor with its positive and negative: one row."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return nn.TripletMarginLoss()(model(batch["anchor"]), model(batch["positive"]), model(batch["negative"]))

    names = ("anchor", "positive", "negative")
    return case(Tower(), loss, several(lambda rows: {name: randn(rows, WIDTH) for name in names}))


@kind
def contrast_of_two_views() -> Case:
    """SimCLR: every row is a negative of every other."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        one, other = (nn.functional.normalize(model(view), dim=-1) for view in batch)
        return nn.functional.cross_entropy(one @ other.T / 0.1, torch.arange(len(one)))

    return case(Tower(), loss, several(lambda rows: (randn(rows, WIDTH), randn(rows, WIDTH))))


@kind
def weak_contrast_beside_a_mean() -> Case:
    """Rows mix in a term a thousandth of the whole."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        features = nn.functional.normalize(model(batch["x"]), dim=-1)
        return classify(model, batch) + 1e-4 * (features @ features.T).square().mean()

    return case(Tower(), loss, several(vectors))


@kind
def normalised_advantages() -> Case:
    """REINFORCE: rewards lose the batch's mean before they weigh anything."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        reward = batch["reward"]
        advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
        chosen = model(batch["x"]).log_softmax(-1).gather(1, batch["action"][:, None])[:, 0]
        return -(chosen * advantage).mean()

    def episodes(rows: int) -> dict[str, Tensor]:
        return {"x": randn(rows, WIDTH), "action": torch.randint(0, CLASSES, (rows,)), "reward": randn(rows)}

    return case(Tower(), loss, several(episodes))


@kind
def mixed_up_rows() -> Case:
    """Mixup: each row is blended with another one of the batch."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        other = torch.arange(len(batch["x"])).roll(1)
        logits = model(0.7 * batch["x"] + 0.3 * batch["x"][other])
        return 0.7 * nn.functional.cross_entropy(logits, batch["y"]) + 0.3 * nn.functional.cross_entropy(
            logits, batch["y"][other]
        )

    return case(Tower(), loss, several(vectors))


@kind
def gradient_penalty() -> Case:
    """WGAN-GP: the norm of the gradient by the input is part of the loss."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"].detach().requires_grad_()
        score = model(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score.mean() + 10 * ((slope.norm(dim=1) - 1) ** 2).mean()

    return case(Tower(1), loss, several(numbers))


@kind
def physics_by_second_derivatives() -> Case:
    """A PINN: u'' + u = 0 at points, with smooth activations and no norm."""
    layers = [nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)]

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        x = batch.detach().requires_grad_()
        u = model(x)
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        return (second + u).square().mean()

    return case(nn.Sequential(*layers), loss, several(lambda rows: randn(rows, 1)))


@kind
def adversarial_examples() -> Case:
    """A first pass finds the input's gradient, a second one trains on the input moved along it."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"].detach().requires_grad_()
        (slope,) = torch.autograd.grad(classify(model, {**batch, "x": x}), x)
        return classify(model, {**batch, "x": (x + 0.1 * slope.sign()).detach()})

    return case(Tower(), loss, several(vectors))


# What becomes of logits before the loss -------------------------------------------------------------------------------


@kind
def logits_with_a_soft_cap() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = 3 * torch.tanh(model(batch["input_ids"]) / 3)
        return next_token(logits, batch["labels"])

    return case(Embedded(), loss, several(text))


@kind
def logits_divided_by_a_temperature() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return next_token(model(batch["input_ids"]) / 0.7, batch["labels"])

    return case(Embedded(), loss, several(text))


@kind
def logits_written_through_a_view() -> Case:
    """A token is forbidden by writing through a slice, while the loss reads the whole."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["input_ids"])
        logits[..., 0].fill_(-30.0)
        return next_token(logits, batch["labels"])

    return case(Embedded(), loss, several(text))


@kind
def logits_changed_in_place() -> Case:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["input_ids"])
        logits.div_(0.5)
        logits[:, :, 1:3] = -20.0
        return next_token(logits, batch["labels"])

    return case(Embedded(), loss, several(text))


@kind
def logits_flattened_and_written_later() -> Case:
    """A view is taken first, the base written then, and the view read."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["input_ids"])
        flat = logits.view(-1, logits.shape[-1])
        logits[:, :, 0] = -30.0
        return nn.functional.cross_entropy(flat, batch["labels"].flatten())

    return case(Embedded(), loss, several(text))


@kind
def logits_read_twice() -> Case:
    """The loss, and a z-loss on the same logits."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["input_ids"])
        return next_token(logits, batch["labels"]) + 1e-3 * logits.logsumexp(-1).square().mean()

    return case(Embedded(), loss, several(text))


@kind
def logits_kept_on_the_model_and_counted() -> Case:
    """A metric inside the loss: how many guesses were right so far."""

    class Keeping(Embedded):
        def __init__(self) -> None:
            super().__init__()
            self.last: Tensor | None = None
            self.register_buffer("right", torch.zeros((), dtype=torch.long))

        def forward(self, tokens: Tensor) -> Tensor:
            self.last = super().forward(tokens)
            return self.last

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = language(model, batch)
        model.right += (model.last[:, :-1].argmax(-1) == batch["labels"][:, 1:]).sum()
        return found

    return case(Keeping(), loss, several(text))


# Batches of other shapes ----------------------------------------------------------------------------------------------


@kind
def labels_nested_under_another_name() -> Case:
    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return next_token(model(batch["source"]["tokens"]), batch["annotation"]["gold"])

    def nested(rows: int) -> dict[str, Any]:
        batch = text(rows)
        return {"source": {"tokens": batch["input_ids"]}, "annotation": {"gold": batch["labels"]}}

    return case(Embedded(), loss, several(nested))


@kind
def a_list_with_a_tensor_for_each_row() -> Case:
    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        x, boxes = batch["x"], batch["boxes"]
        each = [(logits[: len(box)] - box).abs().mean() for logits, box in zip(model(x), boxes, strict=True)]
        return torch.stack(each).mean()

    def boxed(rows: int) -> dict[str, Any]:
        return {"x": randn(rows, LENGTH, WIDTH), "boxes": [randn(2 + row % 3, 4) for row in range(rows)]}

    return case(Tower(4), loss, several(boxed))


@kind
def names_and_indices_beside_the_tensors() -> Case:
    """Lists of strings and numbers, one for each row, and the loss reads the numbers."""

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        weights = torch.tensor(batch["weights"], dtype=torch.float64)
        assert len(batch["names"]) == len(weights)
        each = nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return (each * weights).mean()

    def named(rows: int) -> dict[str, Any]:
        names = [f"image-{row}.png" for row in range(rows)]
        return {**vectors(rows), "weights": [1.0 + row for row in range(rows)], "names": names}

    return case(Tower(), loss, several(named))


class Pair(NamedTuple):
    tokens: Tensor
    labels: Tensor


@dataclass
class Item:
    x: Tensor
    y: Tensor
    split: str


@kind
def a_named_tuple() -> Case:
    def loss(model: nn.Module, batch: Pair) -> Tensor:
        return next_token(model(batch.tokens), batch.labels)

    return case(Embedded(), loss, several(lambda rows: Pair(text(rows)["input_ids"], text(rows)["labels"])))


@kind
def a_dataclass() -> Case:
    def loss(model: nn.Module, batch: Item) -> Tensor:
        return nn.functional.cross_entropy(model(batch.x), batch.y)

    return case(Tower(), loss, several(lambda rows: Item(**vectors(rows), split="train")))


@kind
def a_table_with_as_many_rows_as_the_batch() -> Case:
    """A table of class prototypes travels with each batch; it has as many rows as the batch by chance."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch["x"]) @ batch["prototypes"].T, batch["y"])

    def with_table(rows: int) -> dict[str, Tensor]:
        return {"x": randn(rows, WIDTH), "prototypes": randn(ROWS, 3), "y": torch.randint(0, ROWS, (rows,))}

    return case(Tower(3), loss, several(with_table))


@kind
def a_mask_with_as_many_rows_as_the_batch() -> Case:
    """A mask of [length, length] comes with a batch that has as many rows as tokens."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        hidden = batch["mask"] @ model(batch["x"])
        return nn.functional.cross_entropy(hidden.flatten(0, 1), batch["y"].flatten())

    def square(rows: int) -> dict[str, Tensor]:
        x, y = randn(rows, ROWS, WIDTH), torch.randint(0, CLASSES, (rows, ROWS))
        return {"x": x, "y": y, "mask": torch.ones(ROWS, ROWS).tril().double()}

    return case(Tower(block=Block), loss, several(square))


@kind
def later_batches_of_other_lengths() -> Case:
    def longer(length: int, rows: int) -> dict[str, Tensor]:
        tokens = ids(rows, length)
        return {"input_ids": tokens, "labels": tokens}

    return case(Embedded(), language, [longer(6, ROWS), longer(9, ROWS + 2), longer(3, 1)])
