"""Mixed precision: FP64 is left alone, FP32 computes in half, FP16 scales its loss and skips what overflows."""

import pytest
import torch

from fit.cases import CASES, assert_same_training, build_training, gradients, take_step
from tonnage.fit.technique import NotApplicable
from tonnage.fit.techniques.autocast import Autocast
from tonnage.fit.training import Training


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES)
def test_training_in_fp64_is_unchanged(case: str, dtype: str) -> None:
    assert_same_training(CASES[case], Autocast(dtype=dtype), clip_norm=1.0)


def _in_fp32(case: str = "gpt2") -> Training:
    return build_training(CASES[case], dtype=torch.float32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_linear_layers_compute_in_half_and_gradients_stay_fp32(dtype: str) -> None:
    training = _in_fp32("llama")
    seen: list[torch.dtype] = []
    training.model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    plain_loss, plain = gradients(training)
    undo = Autocast(dtype=dtype).apply(training)
    loss, found = gradients(training)
    undo()
    gradients(training)
    assert seen == [torch.float32, getattr(torch, dtype), torch.float32]
    assert abs(loss - plain_loss) < 0.02 * plain_loss
    for name, gradient in plain.items():
        assert found[name].dtype == torch.float32
        error = torch.linalg.vector_norm(found[name] - gradient) / torch.linalg.vector_norm(gradient)
        assert error < 0.05, name


def test_no_narrowed_weight_outlives_the_layer_that_used_it() -> None:
    training = _in_fp32("llama")
    Autocast().apply(training)
    with training.forward_pass(), torch.no_grad():
        training.loss(training.model, training.sample)
        assert not torch.is_autocast_cache_enabled()
    assert gradients(training)[1].keys() == dict(training.model.named_parameters()).keys()


def test_a_step_that_overflows_in_fp16_is_left_out_and_the_scale_falls() -> None:
    training = _in_fp32()
    Autocast(dtype="float16").apply(training)
    before = [parameter.detach().clone() for parameter in training.model.parameters()]
    scale = training.stepper.scaler.get_scale()
    training.stepper.begin(1)
    training.stepper.backward(training.loss(training.model, training.sample) * 1e38, last=True)
    training.stepper.finish()
    assert training.stepper.scaler.get_scale() < scale
    assert all(torch.equal(old, new) for old, new in zip(before, training.model.parameters(), strict=True))
    take_step(training, seed=0)
    assert not all(torch.equal(old, new) for old, new in zip(before, training.model.parameters(), strict=True))


def test_undo_gives_back_the_stepper_and_the_forward_pass() -> None:
    training = _in_fp32()
    stepper = training.stepper
    Autocast(dtype="float16").apply(training)()
    assert training.stepper is stepper
    assert training.forward_contexts == []


def test_only_fp16_rules_out_other_steppers() -> None:
    assert Autocast().conflicts == {}
    assert "step-in-backward" in Autocast(dtype="float16").conflicts
    assert Autocast(dtype="float16").settings() == {"dtype": "float16"}


def test_it_refuses_a_model_that_is_narrow_already() -> None:
    training = build_training(CASES["llama"], dtype=torch.bfloat16)
    with pytest.raises(NotApplicable, match="bfloat16 already"):
        Autocast().apply(training)
    assert training.forward_contexts == []


def test_it_refuses_an_unknown_type() -> None:
    with pytest.raises(NotApplicable, match="int8"):
        Autocast(dtype="int8")
