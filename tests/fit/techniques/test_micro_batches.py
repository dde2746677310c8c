from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from fit.cases import CASES, Case, DropoutNet, assert_same_parameters, build_training
from tonnage.fit.stepping.step import take_step
from tonnage.fit.stepping.stepper import Stepper
from tonnage.fit.technique import NotApplicable
from tonnage.fit.techniques.micro_batches import MicroBatches
from tonnage.fit.training import Training


def _uneven(training: Training) -> Training:
    """In evaluation mode, and with more labels in some rows than in others."""
    training.model.eval()
    labels = training.sample["labels"] if "labels" in training.sample else training.sample["y"]
    if labels.ndim == 2:
        labels[0, :8] = -100
    return training


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("count", [2, 3])
def test_training_is_that_of_the_whole_batch(case: str, count: int) -> None:
    plain, fitted = (_uneven(build_training(CASES[case], clip_norm=0.5)) for _ in range(2))
    if case == "dropout":  # its loss knows -100 as well
        assert (plain.sample["y"] == -100).any()
    undo = MicroBatches(count=count).apply(fitted)
    for _ in range(10):
        expected, found = take_step(plain, plain.sample), take_step(fitted, fitted.sample)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    undo()
    assert (fitted.micro_batches, fitted.weighting) == (1, "rows")
    assert_same_parameters(plain.model, fitted.model, 1e-10)


def test_the_weighting_is_found_by_losses_not_by_names() -> None:
    """A causal model whose loss does not shift its labels."""

    def unshifted(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(input_ids=batch["input_ids"]).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    training = build_training(CASES["llama"])
    training.loss = unshifted
    training.sample["labels"][:, 0] = 1
    training.sample["labels"][0, 1:8] = -100
    MicroBatches(count=2).apply(training)
    assert training.weighting == "tokens"


def test_a_mean_over_rows_with_ignored_labels_weighs_rows() -> None:
    def per_row(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["x"])
        each = nn.functional.cross_entropy(logits.transpose(1, 2), batch["y"], reduction="none")
        return (each.sum(1) / (batch["y"] != -100).sum(1)).mean()

    training = _uneven(build_training(CASES["dropout"]))
    training.sample["y"][0, :] = torch.tensor([-100, -100, -100, -100, 1, 1])
    training.loss = per_row
    MicroBatches(count=2).apply(training)
    assert training.weighting == "rows"


def test_losses_divided_by_a_given_number_are_summed() -> None:
    training = _uneven(build_training(CASES["llama"]))
    training.sample["num_items_in_batch"] = torch.tensor(30)
    training.loss = lambda model, batch: model(**batch).loss
    MicroBatches(count=2).apply(training)
    assert training.weighting == "sum"


def test_a_loss_across_rows_is_refused_and_nothing_changes() -> None:
    def contrastive(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        features = model(batch["x"]).flatten(1)
        return nn.functional.cross_entropy(features @ features.T, torch.arange(len(features)))

    training = build_training(CASES["dropout"])
    training.model.eval()
    training.loss = contrastive
    state = torch.get_rng_state()
    with pytest.raises(NotApplicable, match="no mean or sum over rows or tokens"):
        MicroBatches(count=2).apply(training)
    assert training.micro_batches == 1
    assert torch.equal(torch.get_rng_state(), state)


def test_dropout_is_refused_unless_resampling_is_accepted() -> None:
    training = build_training(CASES["gpt2"])
    with pytest.raises(NotApplicable, match="draws other numbers"):
        MicroBatches(count=2).apply(training)
    MicroBatches(count=2, dropout="resampled").apply(training)
    assert training.weighting == "shifted-tokens"
    assert training.model.training
    assert all(module.training for module in training.model.modules())


def test_random_numbers_hidden_in_a_loss_are_found() -> None:
    training = build_training(CASES["dropout"])
    training.model.eval()
    training.loss = lambda model, batch: model(batch["x"] + torch.randn_like(batch["x"])).square().mean()
    with pytest.raises(NotApplicable, match="draws random numbers"):
        MicroBatches(count=2).apply(training)


class BatchNormNet(DropoutNet):
    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.statistics(x))


def _batch_norm() -> Case:
    _, batch, loss = CASES["dropout"]()
    return BatchNormNet(), batch, loss


def test_an_active_batch_norm_is_refused() -> None:
    reason = MicroBatches(count=2).why_not(build_training(_batch_norm))
    assert reason is not None
    assert "statistics normalises over the batch" in reason


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"count": 5}, "4 rows"),
        ({"count": 0}, "0 micro-batches"),
        ({"count": 2, "weighting": "words"}, "no weighting"),
        ({"count": 2, "dropout": "none"}, "dropout="),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], words: str) -> None:
    reason = MicroBatches(**settings).why_not(build_training(CASES["llama"]))
    assert reason is not None
    assert words in reason


def test_a_stepper_that_cannot_accumulate_is_refused() -> None:
    training = build_training(CASES["llama"])
    training.stepper.accumulates = False
    reason = MicroBatches(count=2).why_not(training)
    assert reason is not None
    assert "cannot accumulate" in reason


def test_a_smaller_last_batch_has_fewer_parts() -> None:
    training = build_training(CASES["llama"])
    MicroBatches(count=4).apply(training)
    begun: list[int] = []
    training.stepper.begin = begun.append  # type: ignore[method-assign]
    take_step(training, {name: tensor[:3] for name, tensor in training.sample.items()})
    assert begun == [3]


class Wrapped(nn.Module):
    """As DistributedDataParallel: asks in forward whether gradients are to be exchanged."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.exchanging = True
        self.seen: list[bool] = []

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.exchanging = False
        try:
            yield
        finally:
            self.exchanging = True

    def forward(self, **batch: Tensor) -> Any:
        self.seen.append(self.exchanging)
        return self.inner(**batch)


def _wrapped() -> tuple[Training, Wrapped]:
    training = build_training(CASES["llama"])
    wrapper = Wrapped(training.model)
    training.model = wrapper
    return training, wrapper


def test_gradients_are_exchanged_in_the_last_part_alone() -> None:
    training, wrapper = _wrapped()
    undo = MicroBatches(count=3).apply(training)
    wrapper.seen.clear()
    take_step(training, training.sample)
    take_step(training, training.sample)
    assert wrapper.seen == [False, False, True] * 2
    undo()
    assert type(training.stepper) is Stepper


def test_a_step_that_raises_leaves_exchanging_on_and_gradients_as_they_were() -> None:
    training, wrapper = _wrapped()
    MicroBatches(count=2).apply(training)
    before = [torch.ones_like(parameter) for parameter in wrapper.parameters()]
    for parameter, gradient in zip(wrapper.parameters(), before, strict=True):
        parameter.grad = gradient
    plain_loss = training.loss

    def raising(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        plain_loss(model, batch)
        if len(wrapper.seen) == 2:
            raise ArithmeticError("in the second part")
        return plain_loss(wrapper.inner, batch)

    training.loss = raising
    wrapper.seen.clear()
    with pytest.raises(ArithmeticError):
        take_step(training, training.sample)
    assert wrapper.exchanging
    assert all(p.grad is gradient for p, gradient in zip(wrapper.parameters(), before, strict=True))


def test_a_real_distributed_wrapper_trains_the_same(tmp_path: Path) -> None:
    """One process of one: what is exchanged is what was there, but the reducer checks that it is asked in time."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        plain, fitted = build_training(CASES["llama"]), build_training(CASES["llama"])
        inner = fitted.model
        fitted.model = nn.parallel.DistributedDataParallel(inner)
        MicroBatches(count=3).apply(fitted)
        assert fitted.weighting == "shifted-tokens"
        for _ in range(3):
            take_step(plain, plain.sample)
            take_step(fitted, fitted.sample)
        assert_same_parameters(plain.model, inner, 1e-10)
    finally:
        distributed.destroy_process_group()
