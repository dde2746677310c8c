"""Weights on the host: the same training, plain state dicts, and the memory of a few blocks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fit.cases import CASES, assert_same_parameters, assert_same_training, build_training, gradients, take_step
from fit.virtual_peaks import peaks
from tonnage.fit.modules import find_blocks, replace_forward
from tonnage.fit.moving.host import ALIGNMENT_BYTES, PinnedSpace
from tonnage.fit.stepping.stepper import Stepper
from tonnage.fit.technique import NotApplicable, Technique
from tonnage.fit.techniques.activation_offload import ActivationOffload
from tonnage.fit.techniques.host_states import HostStates
from tonnage.fit.techniques.recompute import Recompute
from tonnage.fit.techniques.step_in_backward import StepInBackward
from tonnage.fit.techniques.tiled_mlp import TiledMlp
from tonnage.fit.techniques.weight_streaming import BlockWeights, WeightStreamer, WeightStreaming, nan_of, packing_of
from tonnage.fit.training import Training
from tonnage.units import KIB


def names_of(case: str) -> tuple[str, ...]:
    return tuple(find_blocks(CASES[case]()[0]))


def streaming(case: str, **settings: object) -> WeightStreaming:
    return WeightStreaming(blocks=names_of(case), **settings)


@pytest.mark.parametrize("case", CASES)
def test_training_is_the_plain_one(case: str) -> None:
    assert_same_training(CASES[case], streaming(case), clip_norm=1.0)


@pytest.mark.parametrize("case", CASES)
def test_blocks_that_run_again_bring_their_weights_again(case: str) -> None:
    recompute = Recompute(modes=dict.fromkeys(names_of(case), "block"))
    assert_same_training(CASES[case], streaming(case), recompute, steps=4)


BESIDE: dict[str, Technique] = {
    "step-in-backward": StepInBackward(),
    "host-states": HostStates(how="host"),
    "host-gradients": HostStates(how="host", gradients="host"),
    "device-states": HostStates(how="device"),
    "offload": ActivationOffload(blocks=names_of("llama"), minimum_bytes=0, window_bytes=0),
    "tiled": TiledMlp(tiles=3),
}


@pytest.mark.parametrize("other", BESIDE)
def test_beside_another_technique(other: str) -> None:
    assert_same_training(CASES["llama"], streaming("llama"), BESIDE[other], steps=4)


def test_all_together() -> None:
    recompute = Recompute(modes=dict.fromkeys(names_of("llama"), "block"))
    others = [recompute, BESIDE["offload"], BESIDE["device-states"], BESIDE["tiled"]]
    assert_same_training(CASES["llama"], streaming("llama"), *others, steps=4)


def test_two_micro_batches_and_a_checkpoint_of_torch() -> None:
    plain, fitted = (build_training(CASES["llama"], clip_norm=0.5) for _ in range(2))
    undo = streaming("llama").apply(fitted)
    for block in find_blocks(fitted.model).values():
        replace_forward(block, _checkpointed(block.forward))
    for training in (plain, fitted):
        training.stepper.begin(2)
        for last in (False, True):
            loss = training.loss(training.model, training.sample)
            training.stepper.backward(loss, last=last)
        training.stepper.finish()
    assert_same_parameters(plain.model, fitted.model, 1e-10)
    assert undo


def _checkpointed(forward: object) -> object:
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def test_parameters_are_nowhere_between_uses_and_state_dicts_have_their_values() -> None:
    plain, fitted = (build_training(CASES["llama"]) for _ in range(2))
    first = fitted.model.model.layers[0].mlp.up_proj.weight
    undo = streaming("llama").apply(fitted)
    assert first.isnan().all()
    assert first.shape == plain.model.model.layers[0].mlp.up_proj.weight.shape
    take_step(plain, 0), take_step(fitted, 0)
    assert_same_parameters(plain.model, fitted.model, 1e-10)
    assert_same_parameters(plain.model.model.layers[1], fitted.model.model.layers[1], 1e-10)
    undo()
    assert first is fitted.model.model.layers[0].mlp.up_proj.weight
    torch.testing.assert_close(first, plain.model.model.layers[0].mlp.up_proj.weight)


def test_a_checkpoint_of_a_plain_model_can_be_loaded_and_the_reverse() -> None:
    plain, fitted = (build_training(CASES["gpt2"]) for _ in range(2))
    take_step(plain, 0)
    streaming("gpt2").apply(fitted)
    gradients(fitted)  # blocks are on the device now
    assert not fitted.model.load_state_dict(plain.model.state_dict()).missing_keys
    fitted.optimizer.load_state_dict(plain.optimizer.state_dict())
    assert_same_parameters(plain.model, fitted.model, 0)
    torch.testing.assert_close(gradients(fitted), gradients(plain), rtol=1e-10, atol=1e-10)
    take_step(fitted, 1)
    plain.model.load_state_dict(fitted.model.state_dict())
    plain.optimizer.load_state_dict(fitted.optimizer.state_dict())
    torch.testing.assert_close(take_step(fitted, 2), take_step(plain, 2), rtol=1e-10, atol=1e-10)


def test_loading_by_assignment_is_refused() -> None:
    plain, fitted = (build_training(CASES["llama"]) for _ in range(2))
    undo = streaming("llama").apply(fitted)
    with pytest.raises(NotApplicable, match=r"'model\.layers\.0'"):
        fitted.model.load_state_dict(plain.model.state_dict(), assign=True)
    undo()
    assert_same_parameters(plain.model, fitted.model, 0)


def test_a_compiled_block_finds_its_weights() -> None:
    plain, fitted = (build_training(CASES["vit"]) for _ in range(2))
    torch.compiler.reset()
    for block in find_blocks(fitted.model).values():
        replace_forward(block, torch.compile(block.forward, backend="aot_eager"))
    streaming("vit").apply(fitted)
    for step in range(3):
        torch.testing.assert_close(take_step(fitted, step), take_step(plain, step), rtol=1e-10, atol=1e-10)


def test_a_step_that_raises_leaves_all_as_it_was() -> None:
    plain, fitted = (build_training(CASES["llama"]) for _ in range(2))
    undo = streaming("llama").apply(fitted)
    fitted.stepper.begin(1)
    with pytest.raises(RuntimeError, match="size of tensor"):
        fitted.model.model.layers[1](torch.zeros(1, 2, 3))
    fitted.stepper.abandon()
    torch.testing.assert_close(take_step(fitted, 0), take_step(plain, 0), rtol=1e-10, atol=1e-10)
    undo()
    assert_same_parameters(plain.model, fitted.model, 1e-10)


class Shared(nn.Module):
    """Two blocks that share a weight, which a third module uses too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)) for _ in range(3))
        self.blocks[2][0].weight = self.blocks[0][0].weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_shared_parameters_stay() -> None:
    model = Shared()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = Training(
        model=model,
        optimizer=optimizer,
        loss=lambda model, x: model(x),
        sample=torch.ones(2, 4),
        device=torch.device("cpu"),
        stepper=Stepper(optimizer),
    )
    WeightStreaming(blocks=("blocks.0", "blocks.1", "blocks.2")).apply(training)
    assert not model.blocks[0][0].weight.isnan().any()
    assert model.blocks[1][0].weight.isnan().all()
    assert take_step(training, 0) > take_step(training, 1)


def test_what_cannot_be_streamed_is_refused_and_nothing_changed() -> None:
    training = build_training(CASES["llama"])
    before = {name: parameter.data_ptr() for name, parameter in training.model.named_parameters()}
    with pytest.raises(NotApplicable, match="no block 'nothing'"):
        WeightStreaming(blocks=("nothing",)).apply(training)
    with pytest.raises(NotApplicable, match="slots=1"):
        streaming("llama", slots=1).apply(training)
    with pytest.raises(NotApplicable, match=r"which has 1\.00 KiB"):
        streaming("llama", host_bytes=KIB).apply(training)
    weight = training.model.model.layers[0].mlp.up_proj.weight
    weight.data = torch.zeros(2, *weight.shape, dtype=weight.dtype)[0]
    with pytest.raises(NotApplicable, match="share their memory"):
        streaming("llama").apply(training)
    after = {name: parameter.data_ptr() for name, parameter in training.model.named_parameters()}
    assert {name for name in before if before[name] != after[name]} == {"model.layers.0.mlp.up_proj.weight"}
    assert type(training.stepper) is Stepper


def test_the_virtual_gpu_holds_two_blocks_of_twelve() -> None:
    found = peaks("weight-streaming")
    assert found["plain"] - found["streamed"] == (12 - 2) * found["block"] - 512  # the NaN


CPU = torch.device("cpu")


def blocks_of(count: int) -> list[BlockWeights]:
    """Block i has a matrix and a vector full of i."""
    space, nan, blocks = PinnedSpace(CPU, 2**30), nan_of(CPU), []
    for index in range(count):
        parameters = [nn.Parameter(torch.full(shape, float(index))) for shape in ((3, 5), (7,))]
        blocks.append(BlockWeights(parameters, space, nan))
    return blocks


def test_places_are_aligned_and_apart() -> None:
    packing = packing_of(nn.Parameter(torch.zeros(n, dtype=d)) for n, d in ((3, torch.half), (5000, torch.float)))
    assert [place.start for place in packing.places.values()] == [0, ALIGNMENT_BYTES]
    assert packing.byte_count == ALIGNMENT_BYTES + 5 * ALIGNMENT_BYTES


def test_a_transposed_parameter_keeps_its_strides() -> None:
    parameter = nn.Parameter(torch.arange(6.0).view(2, 3).t().clone(memory_format=torch.preserve_format))
    expected, stride = parameter.detach().clone(), parameter.stride()
    weights = BlockWeights([parameter], PinnedSpace(CPU, 2**30), nan_of(CPU))
    assert parameter.isnan().all()
    weights.return_for_good()
    assert torch.equal(parameter, expected)
    assert parameter.stride() == stride


@given(
    count=st.integers(1, 6),
    slots=st.integers(2, 4),
    uses=st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=30),
)
def test_a_block_that_is_brought_has_its_values_and_changes_come_home(
    count: int, slots: int, uses: list[tuple[int, bool]]
) -> None:
    blocks = blocks_of(count)
    streamer = WeightStreamer(blocks, CPU, slots=slots, finish_steps=lambda: None)
    expected = [float(index) for index in range(count)]
    for index, changes in ((index % count, changes) for index, changes in uses):
        streamer.bring(blocks[index])
        assert all((parameter == expected[index]).all() for parameter in blocks[index].places)
        assert sum(weights.slot is not None for weights in blocks) <= slots
        if changes:
            expected[index] += 10
            for parameter in blocks[index].places:
                with streamer.changing(parameter), torch.no_grad():
                    parameter.add_(10)
    streamer.close()
    assert all(parameter.isnan().all() for weights in blocks for parameter in weights.places)
    for weights, value in zip(blocks, expected, strict=True):
        weights.return_for_good()
        assert all((parameter == value).all() for parameter in weights.places)
