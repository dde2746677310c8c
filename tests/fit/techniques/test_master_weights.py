"""BF16 parameters with FP32 masters: the training that is written out by hand, bit for bit, and plain state dicts."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from fit.cases import CASES, assert_same_parameters, build_training, gradients, take_step
from tonnage.fit.stepping.host_step import pieces_of
from tonnage.fit.technique import NotApplicable
from tonnage.fit.techniques import eight_bit_states as eight_bit
from tonnage.fit.techniques import master_weights
from tonnage.fit.techniques.autocast import Autocast
from tonnage.fit.techniques.eight_bit_states import EightBitStates
from tonnage.fit.techniques.host_states import HostStates
from tonnage.fit.techniques.master_weights import MasterWeights
from tonnage.fit.techniques.step_in_backward import StepInBackward
from tonnage.fit.training import Training


def _training(case: str = "llama", **settings: Any) -> Training:
    training = build_training(CASES[case], dtype=torch.float32, **settings)
    training.sample = {name: v.float() if v.is_floating_point() else v for name, v in training.sample.items()}
    return training


def _by_hand(case: str, steps: int) -> tuple[list[Tensor], nn.Module]:
    """The BF16 model makes gradients, the FP32 model is stepped with them and rounded into the BF16 one."""
    wide = _training(case)
    narrow = copy.deepcopy(wide.model).to(torch.bfloat16)
    for name, buffer in wide.model.named_buffers():
        narrow.get_buffer(name).data = buffer.detach().clone()
    sample = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in wide.sample.items()}
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        narrow.zero_grad()
        loss = wide.loss(narrow, sample)
        loss.backward()
        losses.append(loss.detach())
        for own, master in zip(narrow.parameters(), wide.model.parameters(), strict=True):
            master.grad = None if own.grad is None else own.grad.float()
        wide.optimizer.step()
        for own, master in zip(narrow.parameters(), wide.model.parameters(), strict=True):
            own.data.copy_(master)
    return losses, wide.model


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_training_written_out_by_hand(case: str) -> None:
    losses, expected = _by_hand(case, steps=10)
    training = _training(case)
    undo = MasterWeights().apply(training)
    found = [take_step(training, step) for step in range(10)]
    undo()
    assert [loss.item() for loss in found] == [loss.item() for loss in losses]
    assert_same_parameters(expected, training.model, tolerance=0.0)


@pytest.mark.parametrize("piece_elements", [23, 100, 1 << 30])
def test_pieces_step_as_the_whole(monkeypatch: pytest.MonkeyPatch, piece_elements: int) -> None:
    _, expected = _by_hand("dropout", steps=3)
    monkeypatch.setattr(master_weights, "_PIECE_ELEMENTS", piece_elements)
    training = _training("dropout")
    undo = MasterWeights().apply(training)
    for step in range(3):
        take_step(training, step)
    undo()
    assert_same_parameters(expected, training.model, tolerance=0.0)
    assert all(state["step"] == 3 for state in training.optimizer.state.values())


def test_it_stands_beside_the_step_in_backward() -> None:
    alone, both = _training(), _training()
    MasterWeights().apply(alone)
    undo_masters = MasterWeights().apply(both)
    undo_backward = StepInBackward().apply(both)
    for step in range(4):
        assert torch.equal(take_step(alone, step), take_step(both, step))
    undo_backward()
    undo_masters()
    assert_same_parameters(alone.model, both.model, tolerance=0.0)


def test_the_norm_of_bf16_gradients_is_summed_in_fp32_wherever_the_states_are() -> None:
    training, on_host = _training(clip_norm=0.3), _training(clip_norm=0.3)
    for each in (training, on_host):
        MasterWeights().apply(each)
    HostStates(how="device", gpu_bytes=0, piece_bytes=4096).apply(on_host)
    take_step(training, 0)
    take_step(on_host, 0)
    norm = training.stepper.gradient_norm
    assert norm is not None
    assert norm.dtype == torch.float32
    assert torch.equal(on_host.stepper.gradient_norm, norm)


ON_HOST = {
    "device": HostStates(how="device", gpu_bytes=30_001, piece_bytes=4096),
    "host": HostStates(how="host", gpu_bytes=30_001, piece_bytes=4096),
    "host-gradients": HostStates(how="host", gradients="host", piece_bytes=4096),
}


@pytest.mark.parametrize("way", ON_HOST)
@pytest.mark.parametrize("started", [True, False])
def test_masters_go_to_the_host_with_the_states(way: str, started: bool) -> None:
    alone, both = _training(), _training()
    for training in (alone, both) if started else ():
        take_step(training, 100)
    MasterWeights().apply(alone)
    undo_masters = MasterWeights().apply(both)
    undo_host = ON_HOST[way].apply(both)
    for step in range(3):
        torch.testing.assert_close(take_step(both, step), take_step(alone, step), rtol=0.02, atol=0)
    tolerance = 0.0 if way == "device" else 1e-6
    assert_same_parameters(alone.model, both.model, tolerance)
    for state in both.optimizer.state.values():
        assert all(name in ("step",) for piece in pieces_of(state) if piece.buffer is not None for name in piece.state)
    _reload(both)
    assert_same_parameters(alone.model, both.model, tolerance)
    undo_host()
    undo_masters()
    assert_same_parameters(alone.model, both.model, tolerance)
    assert all(set(state) == {"step", "exp_avg", "exp_avg_sq"} for state in both.optimizer.state.values())


def _reload(training: Training) -> None:
    """Save and load both; what is saved must be plain."""
    model, optimizer = copy.deepcopy((training.model.state_dict(), training.optimizer.state_dict()))
    assert {value.dtype for value in model.values()} == {torch.float32}
    assert all(set(state) == {"step", "exp_avg", "exp_avg_sq"} for state in optimizer["state"].values())
    training.model.load_state_dict(model)
    training.optimizer.load_state_dict(optimizer)
    again = training.optimizer.state_dict()["state"]
    for index, state in optimizer["state"].items():
        assert all(torch.equal(again[index][name], value) for name, value in state.items())


def test_eight_bit_states_step_the_masters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eight_bit, "SMALL_ELEMENTS", 64)
    alone, both = _training(), _training()
    MasterWeights().apply(alone)
    undo_masters = MasterWeights().apply(both)
    undo_codes = EightBitStates().apply(both)
    start = both.model.state_dict()["lm_head.weight"].clone()
    for step in range(5):
        expected, found = take_step(alone, step), take_step(both, step)
    master, parameter = both.model.state_dict()["lm_head.weight"], both.model.lm_head.weight
    assert abs(found - expected) < 0.05 * expected
    assert not torch.equal(master, start)
    assert torch.equal(master.bfloat16(), parameter)
    assert not torch.equal(master, parameter.float())  # it has bits that BF16 has not
    undo_codes()
    undo_masters()
    assert torch.equal(parameter, master)


def test_autocast_looks_after_inputs_and_loss() -> None:
    training = _training("dropout")
    Autocast().apply(training)
    MasterWeights().apply(training)
    assert take_step(training, 0).dtype == torch.float32


def test_parameters_and_gradients_are_bf16_and_the_same_objects() -> None:
    training = _training()
    before = dict(training.model.named_parameters())
    storages = {name: parameter.data_ptr() for name, parameter in before.items()}
    undo = MasterWeights().apply(training)
    _, found = gradients(training)
    assert {gradient.dtype for gradient in found.values()} == {torch.bfloat16}
    assert {name: id(p) for name, p in training.model.named_parameters()} == {n: id(p) for n, p in before.items()}
    undo()
    assert {name: p.data_ptr() for name, p in training.model.named_parameters()} == storages
    assert {p.dtype for p in before.values()} == {torch.float32}
    assert "forward" not in training.model.__dict__


def test_a_gradient_that_was_there_is_kept_in_the_type_of_its_parameter() -> None:
    training = _training("dropout")
    weight = training.model.head.weight
    weight.grad = torch.full_like(weight, 0.5)
    undo = MasterWeights().apply(training)
    assert weight.grad.dtype == torch.bfloat16
    undo()
    assert weight.grad.dtype == torch.float32
    assert torch.equal(weight.grad, torch.full_like(weight, 0.5))


@pytest.mark.parametrize("clip_norm", [None, 1e-3])
def test_state_dicts_are_plain_and_training_goes_on_from_them(clip_norm: float | None) -> None:
    first, second = _training(clip_norm=clip_norm), _training(clip_norm=clip_norm)
    MasterWeights().apply(first)
    for step in range(3):
        take_step(first, step)
    saved_model, saved_optimizer = copy.deepcopy((first.model.state_dict(), first.optimizer.state_dict()))
    assert {value.dtype for value in saved_model.values()} == {torch.float32}
    state = next(iter(saved_optimizer["state"].values()))
    assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
    assert state["exp_avg"].dtype == torch.float32

    MasterWeights().apply(second)
    second.model.load_state_dict(saved_model)
    second.optimizer.load_state_dict(saved_optimizer)
    for step in range(3, 6):
        assert torch.equal(take_step(first, step), take_step(second, step))
    assert_same_parameters(first.model, second.model, tolerance=0.0)


def test_a_plain_model_loads_what_was_saved_and_the_reverse() -> None:
    plain, fitted = _training(), _training()
    for step in range(2):
        take_step(plain, step)
    MasterWeights().apply(fitted)
    fitted.model.load_state_dict(plain.model.state_dict())
    fitted.optimizer.load_state_dict(plain.optimizer.state_dict())
    assert_same_parameters(plain.model, fitted.model, tolerance=0.0)
    other = _training()
    other.model.load_state_dict(fitted.model.state_dict())
    other.optimizer.load_state_dict(fitted.optimizer.state_dict())
    assert torch.equal(take_step(other, 5), take_step(plain, 5))
    assert_same_parameters(plain.model, other.model, tolerance=0.0)


def test_a_part_of_the_model_saves_fp32_too() -> None:
    training = _training()
    expected = copy.deepcopy(training.model.model.layers[1].state_dict())
    MasterWeights().apply(training)
    found = training.model.model.layers[1].state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_frozen_parameters_come_back_exactly() -> None:
    training = _training()
    frozen = training.model.model.embed_tokens.weight.requires_grad_(False)
    before = frozen.detach().clone()
    undo = MasterWeights().apply(training)
    assert frozen.dtype == torch.bfloat16
    take_step(training, 0)
    assert torch.equal(training.model.state_dict()["model.embed_tokens.weight"], before)
    undo()
    assert torch.equal(frozen, before)


def test_schedulers_and_hooks_see_one_step() -> None:
    training = _training()
    scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 1, gamma=0.5)
    calls: list[str] = []
    training.optimizer.register_step_post_hook(lambda *_: calls.append("step"))
    MasterWeights().apply(training)
    take_step(training, 0)
    scheduler.step()
    assert calls == ["step"]
    assert training.optimizer.param_groups[0]["lr"] == 5e-4


def test_optimizer_states_are_as_before_after_undo() -> None:
    training = _training("dropout")
    take_step(training, 0)
    undo = MasterWeights().apply(training)
    take_step(training, 1)
    undo()
    assert all(set(state) == {"step", "exp_avg", "exp_avg_sq"} for state in training.optimizer.state.values())
    take_step(training, 2)


def test_it_refuses_a_model_without_fp32_parameters() -> None:
    training = build_training(CASES["llama"])
    with pytest.raises(NotApplicable, match="no trained parameter is FP32"):
        MasterWeights().apply(training)
    assert not training.optimizer.state


def test_it_refuses_a_wrapper_that_has_made_its_buckets() -> None:
    training = _training("dropout")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        training.model = nn.parallel.DistributedDataParallel(training.model)
        with pytest.raises(NotApplicable, match="buckets"):
            MasterWeights().apply(training)
    finally:
        distributed.destroy_process_group()
