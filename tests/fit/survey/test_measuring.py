"""Blocks run alone as the model runs them."""

from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fit.cases import build_training, llama
from fit.zoo.trainings import KINDS
from tonnage.fit.modules import find_blocks, without_cache
from tonnage.fit.stepping.stepper import Stepper
from tonnage.fit.survey.measuring import (
    _PeaksAround,
    _without_frame,
    capture_calls,
    rehearsal_pace,
    required_gradients,
)
from tonnage.fit.survey.meter import Duration, GpuMeter, Watch
from tonnage.fit.training import Training


def narrow(training: Training) -> None:
    plain = training.loss

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return plain(model, batch)

    training.loss = loss


def type_inside_a_block(training: Training) -> torch.dtype:
    blocks = find_blocks(training.model)
    name, call = next(iter(capture_calls(training, blocks, training.sample).by_kind.values()))
    seen: list[torch.dtype] = []
    linear = next(module for module in blocks[name].modules() if isinstance(module, nn.Linear))
    handle = linear.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    call.forward()
    handle.remove()
    return seen[0]


def test_a_block_alone_computes_under_the_autocast_of_the_loss() -> None:
    training = build_training(llama, dtype=torch.float32)
    assert type_inside_a_block(training) == torch.float32
    narrow(training)
    assert type_inside_a_block(training) == torch.bfloat16


def zoo_training(kind: str) -> Training:
    case = KINDS[kind]()
    stepper = Stepper(case.optimizer)
    return Training(case.model, case.optimizer, case.loss, case.batches[0], torch.device("cpu"), stepper)


def test_blocks_that_a_pass_leaves_out_by_chance_are_found_in_the_order_of_the_model() -> None:
    training = zoo_training("layers dropped by a coin")
    blocks = find_blocks(training.model)
    for _ in range(4):
        calls = capture_calls(training, blocks, training.sample)
        assert list(calls.kinds) == list(blocks)
        assert len(set(calls.kinds.values())) == 1


def test_inputs_require_gradients_where_the_models_own_do_and_hold_no_graph() -> None:
    training = zoo_training("t5")
    blocks = find_blocks(training.model)
    calls = capture_calls(training, blocks, training.sample, required_gradients(training, blocks, training.sample))
    wanted = set()
    for _, call in calls.by_kind.values():
        for tensor in tree_leaves((call.args, call.kwargs)):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                assert tensor.grad_fn is None
                wanted.add(tensor.ndim)
    assert wanted == {3, 4}, "what flows, and the bias of positions, which is learnt"


def test_where_the_loss_asks_for_gradients_itself_its_blocks_are_seen() -> None:
    training = zoo_training("gradient penalty")
    blocks = find_blocks(training.model)
    assert required_gradients(training, blocks, training.sample).keys() <= blocks.keys()
    assert list(capture_calls(training, blocks, training.sample).kinds) == list(blocks)


def test_what_head_and_loss_keep_is_gone_when_blocks_run_backward() -> None:
    stretches = _PeaksAround(Mock(spec=GpuMeter))
    stretches.forward = [(130, 120), (120, 120)]
    stretches.backward = [(700, 150), (150, 150)]  # the loss's peak, then what is there when the last block begins
    assert stretches.peaks(Watch(before_bytes=100, peak_bytes=40, kept_bytes=0)) == {
        "kept_bytes": 50,
        "peak_bytes": 600,
        "stem_peak_bytes": 40,
        "between_peak_bytes": (0,),
    }


@pytest.mark.parametrize("kind", ["llama", "t5", "lora through peft", "swin"])
def test_the_hosts_time_for_running_a_block_alone_is_not_the_blocks(kind: str) -> None:
    training = zoo_training(kind)
    blocks = find_blocks(training.model)
    calls = capture_calls(training, blocks, training.sample, required_gradients(training, blocks, training.sample))
    name, call = next(iter(calls.by_kind.values()))
    ran = list[float]()

    def time(run: Callable[[], object], *, least_s: float) -> Duration:
        run()
        ran.append(least_s)
        return Duration(0.0, 0.1 * len(ran))

    forward, whole = _without_frame(Mock(time=time), call, Duration(1.0, 0.3), Duration(2.0, 0.1))
    assert len(ran) == 2
    assert (forward.gpu_s, whole.gpu_s) == (1.0, 2.0)
    assert (forward.host_s, whole.host_s) == (pytest.approx(0.2), 0.0)
    assert "forward" not in vars(blocks[name])


def test_the_pace_of_rehearsals_is_taken_on_zero_gradients_and_is_never_above_one() -> None:
    training = build_training(llama, dtype=torch.float32)
    without_cache(training.model)
    blocks = find_blocks(training.model)
    name, call = next(iter(capture_calls(training, blocks, training.sample).by_kind.values()))
    gradients: list[float] = []

    class Timing(Mock):
        device = torch.device("cpu")

        def time(self, run: Callable[[], object]) -> Duration:
            run()
            return Duration(0.9)

    handle = next(blocks[name].parameters()).register_hook(lambda gradient: gradients.append(float(gradient.norm())))
    paces = [rehearsal_pace(Timing(), call, usual_s) for usual_s in (1.0, 0.5, 0.0)]
    handle.remove()
    assert paces == [0.9, 1.0, 1.0] and gradients == [0.0] * 3
    assert all(parameter.grad is None for parameter in blocks[name].parameters())
