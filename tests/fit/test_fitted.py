"""A fitted training: steps like the plain one, survives what raises, and is undone once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tonnage
from fit.cases import CASES, assert_same_parameters, build_training
from fit.test_plan import make_plan
from tonnage.errors import RequestError
from tonnage.fit.fitted import Fitted, apply_plan
from tonnage.fit.stepping.backward_stepper import BackwardBroken
from tonnage.fit.stepping.stepper import Stepper
from tonnage.fit.technique import NotApplicable, Technique
from tonnage.fit.techniques.activation_offload import ActivationOffload
from tonnage.fit.techniques.autocast import Autocast
from tonnage.fit.techniques.chunked_loss import ChunkedLoss
from tonnage.fit.techniques.host_states import HostStates
from tonnage.fit.techniques.master_weights import MasterWeights
from tonnage.fit.techniques.micro_batches import MicroBatches
from tonnage.fit.techniques.recompute import Recompute
from tonnage.fit.techniques.step_in_backward import StepInBackward
from tonnage.fit.techniques.tiled_mlp import TiledMlp
from tonnage.fit.techniques.weight_streaming import WeightStreaming
from tonnage.fit.training import Training

LAYERS = ("model.layers.0", "model.layers.1", "model.layers.2")
MODEL_SIDE: list[Technique] = [
    ChunkedLoss(),
    TiledMlp(tiles=2),
    Recompute(modes={LAYERS[0]: "block", LAYERS[1]: "part:mlp"}),
    ActivationOffload(blocks=LAYERS[:2], minimum_bytes=1),
]


def fit_llama(*techniques: Technique, clip_norm: float | None = None) -> Fitted:
    return apply_plan(build_training(CASES["llama"], clip_norm=clip_norm), make_plan(*techniques))


def assert_nothing_left(training: Training) -> None:
    assert not [module for module in training.model.modules() if "forward" in module.__dict__]
    assert not [p for p in training.model.parameters() if p._post_accumulate_grad_hooks or p._backward_hooks]
    assert type(training.stepper) is Stepper
    assert (training.forward_contexts, training.applied, training.micro_batches) == ([], [], 1)
    assert training.model.config.use_cache is True


STEPPED: dict[str, list[Technique]] = {
    "micro-batches": [*MODEL_SIDE, HostStates(gradients="host"), MicroBatches(count=2)],
    "in backward": [*MODEL_SIDE, HostStates(how="device"), StepInBackward()],
    "streamed": [WeightStreaming(blocks=LAYERS), *MODEL_SIDE, HostStates(how="host")],
}


@pytest.mark.parametrize("techniques", STEPPED.values(), ids=STEPPED)
def test_steps_are_the_plain_ones_with_a_schedule_and_after_undo(techniques: list[Technique]) -> None:
    plain, fitted = build_training(CASES["llama"]), fit_llama(*techniques)
    schedules = [
        torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in (plain.optimizer, fitted.optimizer)
    ]
    for step in range(6):
        if step == 4:
            fitted.undo()
            assert_nothing_left(fitted.training)
        found = fitted.step(plain.sample) if step < 4 else _plain_step(fitted.training)
        torch.testing.assert_close(found, _plain_step(plain), rtol=1e-10, atol=1e-10)
        for schedule in schedules:
            schedule.step()
    assert_same_parameters(plain.model, fitted.model, 1e-10)


def test_clipping_is_that_of_the_whole_batch() -> None:
    plain = build_training(CASES["llama"], clip_norm=0.1)
    fitted = fit_llama(*MODEL_SIDE, HostStates(gradients="host"), MicroBatches(count=2), clip_norm=0.1)
    for _ in range(3):
        torch.testing.assert_close(fitted.step(plain.sample), _plain_step(plain), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(fitted.training.stepper.gradient_norm, plain.stepper.gradient_norm)
    assert_same_parameters(plain.model, fitted.model, 1e-10)


def _plain_step(training: Training) -> Tensor:
    training.stepper.begin(1)
    loss = training.loss(training.model, training.sample)
    training.stepper.backward(loss, last=True)
    training.stepper.finish()
    return loss.detach()


def test_undo_twice_is_an_error_and_so_is_whatever_needs_a_fit() -> None:
    fitted = fit_llama(*MODEL_SIDE)
    fitted.undo()
    assert_nothing_left(fitted.training)
    for use in (fitted.undo, fitted.prove, lambda: fitted.step(fitted.training.sample), lambda: fitted.refit("1 GiB")):
        with pytest.raises(RequestError, match="undone already"):
            use()
    assert_nothing_left(fitted.training)


def test_a_model_can_be_fitted_again_once_it_is_plain() -> None:
    fitted = fit_llama(*MODEL_SIDE)
    training = fitted.training

    def fit_again() -> Fitted:
        return tonnage.fit(
            training.model, training.optimizer, loss=training.loss, sample=training.sample, plan=make_plan(*MODEL_SIDE)
        )

    with pytest.raises(RequestError, match="fitted already"):
        fit_again()
    fitted.undo()
    fit_again().undo()
    assert_nothing_left(training)


def test_a_fit_from_a_plan_cannot_choose_again() -> None:
    with pytest.raises(RequestError, match="nothing was surveyed"):
        fit_llama(*MODEL_SIDE).refit("1 GiB")


# Steps that raise -----------------------------------------------------------------------------------------------------


class Breaking:
    """A loss that raises in forward, or in backward, at its n-th call."""

    def __init__(self, plain: Callable[[nn.Module, Any], Tensor], *, call: int, backward: bool) -> None:
        self._plain, self._calls_left, self._backward = plain, call, backward

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self._calls_left -= 1
        if self._calls_left:
            return self._plain(model, batch)
        if not self._backward:
            raise ZeroDivisionError("in forward")
        handle = model.model.layers[1].self_attn.q_proj.register_full_backward_pre_hook(self._raise)
        loss = self._plain(model, batch)
        handle.remove()
        return loss

    def _raise(self, module: nn.Module, gradient: Any) -> None:
        raise ZeroDivisionError("in backward")


BROKEN: dict[str, tuple[list[Technique], int]] = {
    "plain": ([], 1),
    "model side": (MODEL_SIDE[:2], 1),
    "second micro-batch": ([*MODEL_SIDE[:2], MicroBatches(count=2)], 2),
    "second micro-batch, states on the host": ([HostStates(), MicroBatches(count=2)], 2),
    "second micro-batch, gradients on the host": ([HostStates(gradients="host"), MicroBatches(count=2)], 2),
}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("techniques", "call"), BROKEN.values(), ids=BROKEN)
def test_a_step_that_raises_leaves_everything_as_it_was(techniques: list[Technique], call: int, backward: bool) -> None:
    """In backward of the last micro-batch, states on the host are stepped already: that has a test of its own."""
    in_backward = backward and any(technique.name == "host-states" for technique in techniques)
    plain, fitted = build_training(CASES["llama"]), fit_llama(*techniques)
    sound = fitted.training.loss
    _plain_step(plain)
    fitted.step(plain.sample)
    marked = fitted.model.lm_head.weight
    marked.grad = gradient = torch.ones_like(marked)
    before = {name: tensor.clone() for name, tensor in fitted.model.state_dict().items()}
    fitted.training.loss = Breaking(sound, call=call, backward=backward)
    with pytest.raises(BackwardBroken if in_backward else ZeroDivisionError):
        fitted.step(plain.sample)
    assert marked.grad is gradient
    assert torch.equal(gradient, torch.ones_like(marked))
    assert all(p.grad is None for p in fitted.model.parameters() if p is not marked)
    fitted.training.loss = sound
    if in_backward:
        return
    torch.testing.assert_close(fitted.model.state_dict(), before, rtol=0, atol=0)
    marked.grad = None
    torch.testing.assert_close(fitted.step(plain.sample), _plain_step(plain), rtol=1e-10, atol=1e-10)
    assert_same_parameters(plain.model, fitted.model, 1e-10)


def test_a_step_in_backward_that_raises_says_which_parameters_are_new() -> None:
    fitted = fit_llama(StepInBackward())
    fitted.training.loss = Breaking(fitted.training.loss, call=1, backward=True)
    before = {name: tensor.clone() for name, tensor in fitted.model.state_dict().items()}
    with pytest.raises(BackwardBroken, match=r"18 of 30 parameters were already stepped: model\.layers\.1"):
        fitted.step(fitted.training.sample)
    changed = {name for name, tensor in fitted.model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert "lm_head.weight" in changed
    assert "model.embed_tokens.weight" not in changed


# Plans that cannot be applied -----------------------------------------------------------------------------------------


def test_mixed_precision_with_master_weights_can_be_proven() -> None:
    # Autocast was applied to FP32 parameters, which are BF16 when it comes back after the plain run.
    training = build_training(CASES["llama"], dtype=torch.float32)
    fitted = apply_plan(training, make_plan(Autocast(), MasterWeights()))
    assert fitted.prove().parameters == len(list(training.model.parameters()))
    assert training.applied == ["autocast", "master-weights"]


def test_a_plan_that_fails_at_its_last_technique_leaves_a_plain_model() -> None:
    training = build_training(CASES["llama"])
    unknown = ActivationOffload(blocks=("nowhere",))
    for plan in (make_plan(*MODEL_SIDE[:3], unknown), make_plan(*MODEL_SIDE, HostStates(), MicroBatches(count=99))):
        with pytest.raises(NotApplicable):
            apply_plan(training, plan)
        assert_nothing_left(training)


def test_a_plan_of_techniques_that_exclude_each_other_is_refused_with_the_reason() -> None:
    training = build_training(CASES["llama"])
    with pytest.raises(RequestError, match=r"step inside backward.* cannot stand together: .*micro-batch"):
        apply_plan(training, make_plan(StepInBackward(), MicroBatches(count=2)))
    assert_nothing_left(training)


def test_a_plan_of_another_version_recomputes_whole_blocks_and_says_so() -> None:
    training = build_training(CASES["llama"])
    plan = make_plan(Recompute(modes={"model.layers.0": ["3:aten.mm.default"], "model.layers.1": "block"}), torch="0.1")
    with pytest.warns(UserWarning, match=r"made with torch 0\.1 for NVIDIA H200.* recomputed whole here"):
        fitted = apply_plan(training, plan)
    assert [fitted.model.model.layers[n].forward.replayer.kept for n in (0, 1)] == [{}, {}]
    assert fitted.plan is plan


def test_inside_plain_the_model_computes_as_before_and_is_fitted_again_afterwards() -> None:
    fitted = fit_llama(*MODEL_SIDE)
    changed = [name for name, module in fitted.model.named_modules() if "forward" in module.__dict__]
    with pytest.raises(ZeroDivisionError), fitted.plain():
        assert not [module for module in fitted.model.modules() if "forward" in module.__dict__]
        raise ZeroDivisionError
    assert [name for name, module in fitted.model.named_modules() if "forward" in module.__dict__] == changed


@pytest.mark.parametrize("techniques", STEPPED.values(), ids=STEPPED)
def test_steps_go_on_after_a_proof(techniques: list[Technique]) -> None:
    plain, fitted = build_training(CASES["llama"]), fit_llama(*techniques)
    for _ in range(2):
        torch.testing.assert_close(fitted.step(plain.sample), _plain_step(plain), rtol=1e-10, atol=1e-10)
        stepper = fitted.training.stepper
        fitted.prove()
        assert fitted.training.stepper is stepper
    assert_same_parameters(plain.model, fitted.model, 1e-10)
    fitted.undo()
    assert_nothing_left(fitted.training)
