"""A plan is proven before its first step, on a few rows, and a proof changes nothing."""

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tonnage
from fit.cases import CASES, Case, build_training, seed_cpu
from fit.prove.test_proof import Wrong
from fit.test_plan import make_plan
from tonnage.errors import RequestError
from tonnage.fit.fitted import Fitted
from tonnage.fit.prove.first_proof import few_rows, is_divisible, rows_within
from tonnage.fit.prove.proof import NotTheSame
from tonnage.fit.technique import NotApplicable, Technique
from tonnage.fit.techniques.micro_batches import MicroBatches
from tonnage.fit.techniques.recompute import Recompute
from tonnage.fit.techniques.step_in_backward import StepInBackward
from tonnage.fit.training import Training

CLASS_WEIGHTS = torch.tensor([0.1, 1.0, 5.0, 20.0], dtype=torch.float64)


def fit(training: Training, *techniques: Technique, **options: Any) -> Fitted:
    plan = make_plan(*techniques)
    given = {name: getattr(training, name) for name in ("model", "optimizer", "loss", "sample")}
    return tonnage.fit(**given, plan=plan, **options)


class Classifier(nn.Module):
    """With statistics of the batch and masks of dropout, which a forward pass changes."""

    def __init__(self, rows: int | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.norm, self.dropout, self.rows = nn.BatchNorm1d(16), nn.Dropout(0.3), rows

    def forward(self, x: Tensor) -> Tensor:
        if self.rows not in (None, len(x)):
            raise ValueError(f"compiled for {self.rows} rows")
        return self.last(self.dropout(self.norm(self.first(x).tanh())))


def weighted(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch["x"]), batch["labels"], weight=CLASS_WEIGHTS)


COUNTED: list[int] = []  # rows of each call; what a loss closes over is restored after a proof


def counting(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    COUNTED.append(len(batch["x"]))
    return weighted(model, batch)


def rows_of_classes() -> dict[str, Tensor]:
    labels = torch.tensor([0] * 12 + [1, 2, 3, 3])
    return {"x": torch.randn(16, 8, dtype=torch.float64), "labels": labels}


def classes() -> Case:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), rows_of_classes(), weighted


def normalised() -> Case:
    return Classifier(), rows_of_classes(), weighted


def of_sixteen_rows() -> Case:
    return Classifier(rows=16), rows_of_classes(), weighted


def test_class_weights_under_a_plan_made_for_another_loss_train_as_the_plain_model() -> None:
    plain, training = build_training(classes), build_training(classes)
    fitted = fit(training, MicroBatches(count=4, weighting="tokens"))
    assert fitted.proof is not None and fitted.proof.worst_error <= 1e-10
    for _ in range(3):
        plain.optimizer.zero_grad()
        expected = plain.loss(plain.model, plain.sample)
        expected.backward()
        plain.optimizer.step()
        torch.testing.assert_close(fitted.step(training.sample), expected.detach(), rtol=1e-10, atol=1e-10)


def test_a_weighting_that_gives_other_gradients_is_refused_with_its_cause() -> None:
    training = build_training(classes)
    before = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    with pytest.raises(NotTheSame, match=r"does not keep the gradients .*Without micro-batches they are the same") as e:
        fit(training, Recompute(modes={}), MicroBatches(count=4), weighting="rows")
    assert "without plan=" in e.value.hint
    torch.testing.assert_close(training.model.state_dict(), before, rtol=0, atol=0)
    fit(training, MicroBatches(count=4)).undo()  # it is plain, and can be fitted again


def test_a_technique_that_gives_other_gradients_is_named() -> None:
    with pytest.raises(NotTheSame, match="Without wrong they are the same"):
        fit(build_training(CASES["llama"]), Recompute(modes={"model.layers.0": "block"}), Wrong(factor=1.5))


def test_without_measuring_nothing_is_proven() -> None:
    fitted = fit(build_training(classes), MicroBatches(count=4), weighting="rows", measure=False)
    assert fitted.proof is None
    assert not fitted.not_proven


PROVEN: dict[str, tuple[Callable[[], Case], tuple[Technique, ...]]] = {
    "batch norm and dropout": (normalised, (StepInBackward(),)),
    "a fixed number of rows": (of_sixteen_rows, (StepInBackward(),)),
    "dropout": (CASES["dropout"], (Recompute(modes={"blocks.1": "block"}),)),
    "micro-batches": (CASES["vit"], (MicroBatches(count=2),)),
}


@pytest.mark.parametrize(("build", "techniques"), PROVEN.values(), ids=PROVEN)
def test_a_proof_changes_nothing(build: Callable[[], Case], techniques: tuple[Technique, ...]) -> None:
    training = build_training(build)
    training.optimizer = torch.optim.AdamW(training.model.parameters())
    marked = next(training.model.parameters())
    marked.grad = gradient = torch.ones_like(marked)
    seed_cpu(5)
    state = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    before = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    fitted = fit(training, *techniques)
    assert fitted.proof is not None and fitted.proof.worst_error <= fitted.proof.tolerance
    torch.testing.assert_close(training.model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == state[1:]
    assert marked.grad is gradient and torch.equal(gradient, torch.ones_like(marked))
    assert all(parameter.grad is None for parameter in training.model.parameters() if parameter is not marked)
    assert not training.optimizer.state


def test_it_takes_few_rows_with_every_class() -> None:
    training = build_training(classes)
    batch = few_rows(training, 8)
    assert len(batch["labels"]) == 8
    assert set(batch["labels"].tolist()) == {0, 1, 2, 3}
    training.loss = counting
    fitted = fit(training, StepInBackward())
    assert fitted.proof is not None and fitted.proof.rows == 8
    assert COUNTED == [8, 8], "the plain model, and the fitted one"
    assert "proven on 8 rows" in str(fitted)


def test_rows_that_point_at_rows_are_not_taken_by_themselves() -> None:
    nodes, edges = torch.randn(20, 8), torch.zeros(2, 30, dtype=torch.long)
    assert not is_divisible([nodes, edges], 20)
    assert is_divisible([nodes, torch.ones(30, 30), torch.arange(5)[None], torch.tensor(3)], 20)
    training = build_training(classes)
    training.sample["edges"] = edges
    assert few_rows(training, 8) is training.sample
    training.applied.append("micro-batches")
    assert len(few_rows(training, 8)["x"]) == 8


def test_a_loss_that_cannot_be_stepped_is_an_error() -> None:
    training = build_training(classes)
    training.loss = lambda model, batch: functional.cross_entropy(model(batch["x"]), batch["labels"], reduction="none")
    for techniques in ([StepInBackward()], [MicroBatches(count=2)]):
        with pytest.raises(RequestError, match=r"not a scalar: a tensor of shape \[\d+\]"):
            fit(training, *techniques)
    assert not training.model.__dict__.get("forward")


def test_a_sample_that_does_not_train_is_told_and_the_plan_applied() -> None:
    training = build_training(classes)
    training.loss = lambda model, batch: weighted(model, {"x": batch["x"], "labels": batch["goal"]})
    with pytest.warns(UserWarning, match="not proven: A pass over the sample raises KeyError: 'goal'"):
        fitted = fit(training, StepInBackward())
    assert fitted.proof is None
    assert "not proven: A pass over the sample raises KeyError" in str(fitted)


def test_a_plain_model_that_does_not_fit_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    training = build_training(classes)
    plain = training.loss

    def short_of_memory(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if len(batch["x"]) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(model, batch)

    training.loss = short_of_memory
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    with pytest.warns(UserWarning, match="not proven"):
        fitted = fit(training, MicroBatches(count=16), weighting="rows")
    assert "does not fit this card with 2 rows" in fitted.not_proven


def test_a_refusal_while_it_is_proven_restores_the_training() -> None:
    training = build_training(classes)

    def refusing(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        raise NotApplicable("This block cannot run twice.")

    training.loss = refusing
    with pytest.raises(NotApplicable, match="cannot run twice"):
        fit(training, StepInBackward())
    training.loss = weighted
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fit(training, StepInBackward()).proof is not None


def test_a_budget_bounds_the_rows() -> None:
    plan = make_plan()  # 8 rows take 120 GiB, and 40 are there
    assert rows_within(plan, fixed_bytes=0) == 2
    assert rows_within(plan, fixed_bytes=30 << 30) == 1
    assert rows_within(make_plan(batch_rows=64), fixed_bytes=0) == 8
    assert rows_within(make_plan(plain_peak_bytes=0), fixed_bytes=0) == 8, "what the plain step takes is not known"
