"""The proof holds where training is the same, and fails where it is not."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from fit.cases import CASES, Case, build_training, dropout_net, gpt2, llama
from fit.test_plan import make_plan
from tonnage.fit.fitted import Fitted, apply_plan
from tonnage.fit.gradients import rounding
from tonnage.fit.modules import replace_forward
from tonnage.fit.prove.proof import NotTheSame
from tonnage.fit.technique import Technique
from tonnage.fit.techniques.activation_offload import ActivationOffload
from tonnage.fit.techniques.autocast import Autocast
from tonnage.fit.techniques.chunked_loss import ChunkedLoss
from tonnage.fit.techniques.fp8 import Fp8Linear
from tonnage.fit.techniques.host_states import HostStates
from tonnage.fit.techniques.micro_batches import MicroBatches
from tonnage.fit.techniques.recompute import Recompute
from tonnage.fit.techniques.step_in_backward import StepInBackward
from tonnage.fit.training import Training


class Wrong(Technique):
    """Its forward is the plain one, its gradients are not."""

    name: ClassVar[str] = "wrong"
    title: ClassVar[str] = "wrong"
    order: ClassVar[int] = 20

    factor: float = 1.001

    def why_not(self, training: Training) -> str | None:
        return None

    def place(self, training: Training, stack: ExitStack) -> None:
        head = training.model.lm_head
        before = head.forward

        def forward(x: Tensor) -> Tensor:
            return before(x.detach() + (x - x.detach()) * self.factor)

        stack.callback(replace_forward(head, forward))


class Shifted(Wrong):
    """Its gradients are the plain ones, its loss is not."""

    def place(self, training: Training, stack: ExitStack) -> None:
        plain = training.loss
        stack.callback(setattr, training, "loss", plain)
        training.loss = lambda model, batch: plain(model, batch) + 0.01


def uneven() -> Case:
    """Rows with different numbers of labels, so that they do not weigh the same."""
    model, batch, loss = llama()
    for row in range(4):
        batch["labels"][row, : 3 + 2 * row] = -100
    return model, batch, loss


def normalised() -> Case:
    """Rows that mix."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    batch = {"x": torch.randn(6, 8, dtype=torch.float64), "y": torch.randint(0, 3, (6,))}
    return model, batch, lambda model, batch: nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def offset(by: float) -> Callable[[], Case]:
    """A product of which little is left: the larger the offset, the more of it BF16 rounds away."""

    class Offset(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.lm_head = nn.Linear(64, 64), nn.Linear(64, 8)
            nn.init.constant_(self.first.bias, by)

        def forward(self, x: Tensor) -> Tensor:
            return self.lm_head(self.first(x) - by)

    def build() -> Case:
        batch = {"x": torch.randn(4, 64), "y": torch.randint(0, 8, (4,))}
        return Offset(), batch, lambda model, batch: nn.functional.cross_entropy(model(batch["x"]), batch["y"])

    return build


class Fp8Anywhere(Fp8Linear):
    """FP8 layers without tensor cores for them."""

    def why_not(self, training: Training) -> str | None:
        return None


def fitted(build: Callable[[], Case], *techniques: Technique) -> Fitted:
    return apply_plan(build_training(build), make_plan(*techniques))


RECOMPUTED = Recompute(modes={"model.layers.0": "block", "model.layers.2": "part:mlp"})
PROVEN: dict[str, tuple[Callable[[], Case], list[Technique]]] = {
    "llama": (llama, [ChunkedLoss(), RECOMPUTED, StepInBackward()]),
    "uneven labels": (uneven, [ChunkedLoss(), RECOMPUTED]),
    "uneven labels, micro-batches": (uneven, [RECOMPUTED, MicroBatches(count=2), HostStates(gradients="host")]),
    "tied weights": (gpt2, [ChunkedLoss(), HostStates(how="device")]),
    "dropout": (dropout_net, [Recompute(modes={"blocks.1": "block"}), ActivationOffload(blocks=("blocks.0",))]),
    "rows that mix": (normalised, [StepInBackward()]),
}


@pytest.mark.parametrize(("build", "techniques"), PROVEN.values(), ids=PROVEN)
def test_what_is_the_same_is_proven_and_nothing_changes(build: Callable[[], Case], techniques: list[Technique]) -> None:
    fit = fitted(build, *techniques)
    marked = next(fit.model.parameters())
    marked.grad = gradient = torch.ones_like(marked)
    before = {name: tensor.clone() for name, tensor in fit.model.state_dict().items()}
    random_state = torch.get_rng_state()
    proof = fit.prove()
    assert proof.worst_error <= 1e-10
    assert proof.loss == pytest.approx(proof.plain_loss, rel=1e-10)
    assert proof.parameters == sum(1 for _ in fit.model.parameters())
    assert marked.grad is gradient
    assert torch.equal(gradient, torch.ones_like(marked))
    torch.testing.assert_close(fit.model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert fit.techniques == tuple(sorted(techniques, key=lambda technique: technique.order))
    fit.undo()
    assert not any("forward" in module.__dict__ for module in fit.model.modules())


def test_gradients_that_differ_are_found_although_the_loss_is_the_same() -> None:
    fit = fitted(llama, Wrong())
    with pytest.raises(NotTheSame, match=r"1\.0e-03 of its norm"):
        fit.prove()


def test_a_loss_that_differs_is_found_although_its_gradients_are_the_same() -> None:
    with pytest.raises(NotTheSame, match="The loss under fit"):
        fitted(llama, Shifted()).prove()


def test_a_gradient_that_is_missing_is_found() -> None:
    fit = fitted(llama, Wrong())
    object.__setattr__(fit.techniques[0], "factor", 0.0)
    with pytest.raises(NotTheSame):
        fit.prove()


def test_a_proof_says_what_it_compared() -> None:
    proof = fitted(CASES["dropout"], StepInBackward()).prove()
    assert f"{proof.parameters} gradients of 4 rows compared" in str(proof)
    assert "1e-06 is rounding" in str(proof)


def test_compiled_blocks_in_a_narrow_dtype_may_round_elsewhere() -> None:
    training = build_training(llama)
    training.model.bfloat16()
    assert rounding(training) == 6e-2 < rounding(training, compiled=True) < 0.5
    training.model.float()
    assert rounding(training, compiled=True) == rounding(training)
    assert rounding(training, torch.bfloat16, compiled=True) > rounding(training, torch.bfloat16)


def narrow(build: Callable[[], Case], *techniques: Technique) -> Fitted:
    return apply_plan(build_training(build, dtype=torch.float32), make_plan(Autocast(), *techniques))


def test_under_autocast_the_plain_model_rounds_as_the_fitted_one_does() -> None:
    proof = narrow(offset(100), MicroBatches(count=2)).prove()
    assert proof.narrowing is not None
    assert proof.worst_error < 0.02 < proof.tolerance < proof.narrowing < 0.5
    assert f"autocast itself, which both had, changes them by {proof.narrowing:.0e}" in str(proof)


def test_what_is_wrong_is_found_under_autocast() -> None:
    with pytest.raises(NotTheSame, match="Gradients under fit"):
        narrow(offset(100), Wrong(factor=1.1)).prove()


def test_autocast_that_rounds_a_gradient_away_is_found() -> None:
    with pytest.raises(NotTheSame, match=r"Autocast changes gradients by more than 50%"):
        narrow(offset(10000)).prove()


def test_fp8_is_off_while_the_others_are_proven() -> None:
    techniques = [Fp8Anywhere(minimum_width=16), RECOMPUTED]
    fit = fitted(llama, *techniques)
    linear = fit.model.model.layers[1].mlp.up_proj
    in_fp8 = linear(torch.ones(1, linear.in_features).double())
    proof = fit.prove()
    assert proof.worst_error <= 1e-10 and "fp8 was off" in str(proof)
    assert torch.equal(linear(torch.ones(1, linear.in_features).double()), in_fp8)
    with fit.plain():
        assert not torch.equal(linear(torch.ones(1, linear.in_features).double()), in_fp8)
    fit.undo()
    with pytest.raises(NotTheSame):
        fitted(llama, Wrong(), *techniques).prove()


def test_another_batch_than_the_sample_is_proven() -> None:
    fit = fitted(uneven, RECOMPUTED)
    batch = {name: tensor[:2].flip(0) for name, tensor in fit.training.sample.items()}
    assert fit.prove(batch).loss != fit.prove().loss
