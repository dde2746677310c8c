"""Activations on the host: the same training, and the bytes that leave."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fit.cases import CASES, assert_same_training, build_training, gradients, take_step
from fit.virtual_peaks import peaks
from tonnage.fit.modules import find_blocks, replace_forward
from tonnage.fit.moving.host import HostMemoryExhausted
from tonnage.fit.moving.saved_tensors import OffloadWindow
from tonnage.fit.technique import NotApplicable
from tonnage.fit.techniques.activation_offload import ActivationOffload
from tonnage.units import GIB, MIB


def names_of(case: str) -> tuple[str, ...]:
    return tuple(find_blocks(CASES[case]()[0]))


def offload(case: str, **settings: object) -> ActivationOffload:
    return ActivationOffload(blocks=names_of(case), minimum_bytes=0, **settings)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("window_bytes", [0, GIB])
def test_training_is_the_plain_one(case: str, window_bytes: int) -> None:
    assert_same_training(CASES[case], offload(case, window_bytes=window_bytes), clip_norm=1.0)


@pytest.mark.parametrize("case", CASES)
def test_inputs_of_recomputed_blocks(case: str) -> None:
    plain, fitted = (build_training(CASES[case]) for _ in range(2))
    for block in find_blocks(fitted.model).values():
        replace_forward(block, _recomputed(block.forward))
    undo = offload(case, what="inputs", window_bytes=0).apply(fitted)
    for step in range(3):
        torch.testing.assert_close(take_step(fitted, step), take_step(plain, step), rtol=1e-10, atol=1e-10)
    undo()


def _recomputed(forward: object) -> object:
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def test_a_compiled_block_keeps_its_tensors_through_the_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fitted = (build_training(CASES["vit"]) for _ in range(2))
    for block in find_blocks(fitted.model).values():
        replace_forward(block, torch.compile(block.forward, backend="aot_eager"))
    packed = _count_packs(monkeypatch)
    offload("vit", window_bytes=0).apply(fitted)
    torch.compiler.reset()
    torch.testing.assert_close(gradients(fitted), gradients(plain), rtol=1e-10, atol=1e-10)
    assert len(packed) > len(names_of("vit"))


def _count_packs(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    packed: list[Tensor] = []
    plain_pack = OffloadWindow.pack
    monkeypatch.setattr(OffloadWindow, "pack", lambda self, t: (packed.append(t), plain_pack(self, t))[1])
    return packed


def test_evaluation_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    training = build_training(CASES["llama"])
    packed = _count_packs(monkeypatch)
    offload("llama").apply(training)
    with torch.no_grad():
        training.loss(training.model, training.sample)
    assert packed == []


def test_parameters_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    training = build_training(CASES["gpt2"])
    for parameter in training.model.transformer.h[0].mlp.parameters():
        parameter.requires_grad_(False)
    packed = _count_packs(monkeypatch)
    offload("gpt2").apply(training)
    with torch.autocast("cpu", torch.bfloat16):
        training.loss(training.model, training.sample).backward()
    shapes = {tuple(parameter.shape) for parameter in training.model.transformer.h.parameters() if parameter.dim() == 2}
    assert packed
    assert not shapes & {tuple(tensor.shape) for tensor in packed}


def test_undo_restores_the_blocks() -> None:
    training = build_training(CASES["vit"])
    block = training.model.get_submodule(names_of("vit")[0])
    undo = offload("vit").apply(training)
    assert "forward" in vars(block)
    undo()
    assert "forward" not in vars(block)


@pytest.mark.parametrize(
    ("blocks", "reason"),
    [
        ((), "no block was named"),
        (("model.layers.9",), "no block 'model.layers.9'"),
        (("model.layers.0", "model.layers.0.mlp"), "inside 'model.layers.0'"),
        (("model.layers.1", "model.layers.1"), "named twice"),
    ],
)
def test_blocks_that_cannot_be_are_refused(blocks: tuple[str, ...], reason: str) -> None:
    training = build_training(CASES["llama"])
    with pytest.raises(NotApplicable, match=reason):
        ActivationOffload(blocks=blocks).apply(training)
    assert not any("forward" in vars(module) for module in training.model.modules())


def test_too_little_host_memory_is_said_and_the_next_step_works() -> None:
    training = build_training(CASES["llama"])
    undo = offload("llama", host_bytes=4096).apply(training)
    with pytest.raises(HostMemoryExhausted, match=r"4\.00 KiB granted"):
        take_step(training, 0)
    training.stepper.abandon()
    undo()
    take_step(training, 0)


def test_the_peak_of_the_virtual_gpu_falls_by_what_was_moved() -> None:
    """Ten of twelve blocks move the inputs of their linear and of their GELU, but the first input is the sample, which
    lives on; the window's 4 MiB are there still."""
    found = peaks("activation-offload")
    assert found["plain"] - found["moved"] == (2 * 10 - 1) * 2 * MIB - 4 * MIB
