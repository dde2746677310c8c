"""Blocks that run again in backward train as the plain model does, and leave less behind."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fit.cases import CASES, Case, assert_same_training, build_training, gradients, take_step
from fit.virtual_peaks import peaks
from tonnage.fit.choose.frontier import frontier
from tonnage.fit.modules import find_blocks
from tonnage.fit.recomputing import replay
from tonnage.fit.recomputing.operators import operations_clock, profile_operators
from tonnage.fit.recomputing.sliced import first_calls
from tonnage.fit.survey.profile import OperatorProfile
from tonnage.fit.technique import NotApplicable
from tonnage.fit.techniques.recompute import Recompute
from tonnage.fit.techniques.step_in_backward import StepInBackward
from tonnage.fit.training import Training


@pytest.fixture
def leaves_out_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products too are left out where backward does not read them."""
    monkeypatch.setattr(replay, "_WORTHWHILE_OPERATIONS", 0)


def _all(case: str, **settings: int) -> Recompute:
    return Recompute.all(CASES[case]()[0], **settings)


def _profiled(training: Training) -> tuple[OperatorProfile, ...]:
    name, block = next(iter(find_blocks(training.model).items()))
    with torch.no_grad():
        args, kwargs = first_calls(training, {name: block})[name]
    return profile_operators(block, (args[0].detach().requires_grad_(), *args[1:]), kwargs, operations_clock)


def _saved_bytes(training: Training) -> int:
    """What a forward pass leaves for backward, parameters not counted."""
    own = {parameter.untyped_storage().data_ptr() for parameter in training.model.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = training.loss(training.model, training.sample)
    assert loss.requires_grad
    return sum(found.values())


class _CountProducts(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", CASES)
def test_every_block_again_trains_the_same(case: str) -> None:
    assert_same_training(CASES[case], _all(case))


@pytest.mark.usefixtures("leaves_out_everything")
@pytest.mark.parametrize("case", CASES)
def test_without_what_backward_does_not_read_it_trains_the_same(case: str) -> None:
    assert_same_training(CASES[case], _all(case), steps=4)


@pytest.mark.parametrize("case", ["llama", "vit"])
@pytest.mark.parametrize("slices", [2, 3, 9])
def test_slices_train_the_same(case: str, slices: int) -> None:
    assert_same_training(CASES[case], _all(case, slices=slices), steps=3)


@pytest.mark.parametrize("case", ["llama", "gpt2", "vit"])
def test_parts_train_the_same(case: str) -> None:
    assert_same_training(CASES[case], Recompute.attention(CASES[case]()[0]), steps=4)


@pytest.mark.parametrize("case", CASES)
def test_every_choice_of_operators_trains_the_same(case: str) -> None:
    training = build_training(CASES[case])
    choices = frontier(_profiled(training), 0, levels=4)
    assert len(choices) > 2
    for choice in choices:
        modes = dict.fromkeys(find_blocks(training.model), choice.mode)
        assert_same_training(CASES[case], Recompute(modes=modes), steps=2)


def test_steps_inside_backward_see_each_gradient_once_and_whole() -> None:
    assert_same_training(CASES["llama"], _all("llama", slices=2), StepInBackward(), steps=4)


def test_the_gradients_of_one_parameter_arrive_once_from_all_slices() -> None:
    training = build_training(CASES["llama"])
    _all("llama", slices=4).apply(training)
    weight = training.model.model.layers[1].mlp.up_proj.weight
    arrivals: list[Tensor] = []
    weight.register_post_accumulate_grad_hook(lambda parameter: arrivals.append(parameter.grad.clone()))
    _, expected = gradients(build_training(CASES["llama"]))
    gradients(training)
    assert len(arrivals) == 1
    torch.testing.assert_close(arrivals[0], expected["model.layers.1.mlp.up_proj.weight"], rtol=1e-10, atol=1e-10)


def test_a_recomputed_model_leaves_the_inputs_of_its_blocks() -> None:
    training = build_training(CASES["llama"])
    plain_bytes = _saved_bytes(training)
    undo = Recompute(modes={}).apply(training)
    assert _saved_bytes(training) == plain_bytes
    undo()
    _all("llama").apply(training)
    left_bytes = _saved_bytes(training)
    input_bytes = 4 * 12 * 32 * 8
    blocks = len(find_blocks(training.model))
    assert left_bytes < plain_bytes / 2
    # The rest is the head's and the last norm's.
    assert left_bytes < blocks * input_bytes + 12 * input_bytes


@pytest.mark.usefixtures("leaves_out_everything")
def test_the_last_product_of_a_block_is_not_run_again() -> None:
    training = build_training(CASES["dropout"])
    training.model.eval()  # without dropout, whose mask would be made of the product's result
    recompute = _all("dropout")
    recompute.apply(training)
    gradients(training)  # learns
    loss = training.loss(training.model, training.sample)
    with _CountProducts() as backward:
        loss.backward()
    # Of each block: the first product again, and two for the gradient of each; of embedding and head three.
    assert backward.count == 3 * (1 + 4) + 3


def test_random_numbers_after_a_step_are_the_plain_ones() -> None:
    plain, fitted = build_training(CASES["gpt2"]), build_training(CASES["gpt2"])
    _all("gpt2").apply(fitted)
    drawn = []
    for training in (plain, fitted):
        take_step(training, 0)
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)


@pytest.mark.parametrize("mode", ["block", "part:mlp", [42]])
def test_under_autocast_gradients_are_those_of_plain_autocast(mode: object) -> None:
    plain, fitted = (build_training(CASES["llama"], dtype=torch.float32) for _ in range(2))
    Recompute(modes=dict.fromkeys(find_blocks(fitted.model), mode)).apply(fitted)
    for training in (plain, fitted):
        training.around_forward(lambda: torch.autocast("cpu", dtype=torch.bfloat16))
    (_, expected), (_, found) = gradients(plain), gradients(fitted)
    assert {name: torch.equal(found[name], expected[name]) for name in expected} == dict.fromkeys(expected, True)


def test_slices_under_autocast_differ_by_the_rounding_of_sums() -> None:
    plain, fitted = (build_training(CASES["llama"], dtype=torch.float32) for _ in range(2))
    for training in (plain, fitted):
        training.around_forward(lambda: torch.autocast("cpu", dtype=torch.bfloat16))
    _all("llama", slices=2).apply(fitted)
    (_, expected), (_, found) = gradients(plain), gradients(fitted)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() < 0.02 * gradient.abs().max(), name


def test_without_gradients_the_model_is_plain() -> None:
    training = build_training(CASES["llama"])
    expected = training.loss(training.model, training.sample)
    _all("llama").apply(training)
    with torch.no_grad():
        torch.testing.assert_close(training.loss(training.model, training.sample), expected, rtol=0, atol=0)


def test_a_cache_that_holds_tokens_is_read() -> None:
    training = build_training(CASES["llama"])
    tokens = training.sample["input_ids"]
    expected = training.model(tokens).logits[:, 6:]
    cache = training.model(tokens[:, :6]).past_key_values
    _all("llama").apply(training)
    found = training.model(tokens[:, 6:], past_key_values=cache).logits
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_two_backward_passes_over_one_graph_agree() -> None:
    training = build_training(CASES["llama"])
    Recompute(modes={"model.layers.0": [42], "model.layers.1": "block"}).apply(training)
    weight = training.model.model.layers[0].mlp.up_proj.weight
    loss = training.loss(training.model, training.sample)
    (once,) = torch.autograd.grad(loss, weight, retain_graph=True)
    (twice,) = torch.autograd.grad(loss, weight)
    assert torch.equal(once, twice)


def test_undo_leaves_no_trace() -> None:
    training = build_training(CASES["llama"])
    modes = {"model.layers.0": "block", "model.layers.1": "part:mlp", "model.layers.2": [3]}
    before = {name: dict(module.__dict__) for name, module in training.model.named_modules()}
    undo = Recompute(modes=modes).apply(training)
    assert "forward" in training.model.model.layers[0].__dict__
    take_step(training, 0)
    undo()
    assert {name: set(module.__dict__) for name, module in training.model.named_modules()} == {
        name: set(entries) for name, entries in before.items()
    }


def test_settings_survive_json() -> None:
    recompute = Recompute(modes={"a": "block", "b": ["3:aten.mm.default"], "c": [1, 2]}, slices=2)
    assert Recompute(**json.loads(json.dumps(recompute.settings()))) == recompute


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(self.one(x).tanh())


class MixingBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


class NormBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class BorrowingBlock(Block):
    borrowed: Callable[[], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.borrowed()


class WritingBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        x.mul_(2)
        return y


class FailingBlock(Block):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(nn.functional.dropout(x, 0.5))
        if self.fails:
            raise RuntimeError("as told")
        return y


def _net(block: type[Block], rows: int = 4) -> Callable[[], Case]:
    def build() -> Case:
        model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), block(), block())
        return model, torch.randn(rows, 4, dtype=torch.float64), lambda model, batch: model(batch).square().mean()

    return build


@pytest.mark.parametrize(
    ("block", "modes", "slices", "reason"),
    [
        (Block, {"9": "block"}, 1, "no block '9'"),
        (Block, {"2": "some"}, 1, "mode 'some'"),
        (Block, {"2": "part:mlp"}, 1, "its parts are one, two"),
        (Block, {"2": ["x:aten.mm"]}, 1, "no index"),
        (Block, {"2": "block"}, 0, "no number of slices"),
        (NormBlock, {"2": "block"}, 2, "batch norm"),
        (WritingBlock, {"2": "block"}, 1, "3 cannot run twice: it writes into its arguments"),
        (MixingBlock, {"2": "block"}, 2, "mixes the rows"),
    ],
)
def test_it_says_why_not_and_changes_nothing(block: type[Block], modes: dict, slices: int, reason: str) -> None:
    training = build_training(_net(block))
    with pytest.raises(NotApplicable, match=reason):
        Recompute(modes={"3": "block"} | modes, slices=slices).apply(training)
    assert "forward" not in training.model[2].__dict__ and "forward" not in training.model[3].__dict__


def test_one_row_cannot_be_sliced() -> None:
    with pytest.raises(NotApplicable, match="one row"):
        Recompute(modes={"2": "block"}, slices=2).apply(build_training(_net(Block, rows=1)))


def test_active_dropout_cannot_be_sliced() -> None:
    with pytest.raises(NotApplicable, match="random numbers"):
        _all("gpt2", slices=2).apply(build_training(CASES["gpt2"]))


def test_a_functional_dropout_cannot_be_sliced_either() -> None:
    with pytest.raises(NotApplicable, match="random numbers"):
        Recompute(modes={"2": "block"}, slices=2).apply(build_training(_net(FailingBlock)))


@pytest.mark.parametrize(("other", "reason"), [("compile", "compiled"), ("weight-streaming", "copies")])
def test_operators_that_cannot_be_counted_are_not_chosen(other: str, reason: str) -> None:
    training = build_training(_net(Block))
    training.applied.append(other)
    assert reason in str(Recompute(modes={"2": [1]}).why_not(training))
    assert Recompute(modes={"2": "block", "3": "part:one"}).why_not(training) is None


def test_a_compiled_block_and_a_part_of_one_train_the_same() -> None:
    """Compiled by hand, without a code generator: what is traced and divided is the same."""
    plain, fitted = build_training(_net(Block)), build_training(_net(Block))
    for block in fitted.model[2:]:
        block.forward = torch.compile(block.forward, backend="aot_eager_decomp_partition", dynamic=False)
    undo = Recompute(modes={"2": "block", "3": "part:one"}).apply(fitted)
    for step in range(2):
        torch.testing.assert_close(take_step(fitted, step), take_step(plain, step), rtol=1e-10, atol=1e-10)
    undo()
    assert "forward" not in fitted.model[3].one.__dict__


def test_equal_compiled_blocks_share_one_compilation() -> None:
    training, graphs = build_training(_net(Block)), torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    for block in training.model[2:]:
        block.compile(backend=graphs, dynamic=False)
    training.applied.append("compile")
    blocks = [str(index) for index in range(2, len(training.model))]
    assert len(blocks) > 1
    Recompute(modes=dict.fromkeys(blocks, "part:one")).apply(training)
    take_step(training, 0)
    assert graphs.frame_count == 1


def test_a_hook_on_a_gradient_runs_once() -> None:
    plain, fitted = build_training(_net(Block)), build_training(_net(Block))
    for training in (plain, fitted):
        training.model[2].one.weight.register_hook(lambda gradient: gradient * 0.5)
    Recompute(modes={"2": "block"}).apply(fitted)
    (_, expected), (_, found) = gradients(plain), gradients(fitted)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(NotApplicable, match="a hook changes the gradient"):
        Recompute(modes={"3": "block", "2": [1]}).apply(plain)


def test_a_model_that_recomputes_by_itself_is_left_alone() -> None:
    training = build_training(CASES["llama"])
    training.model.gradient_checkpointing_enable()
    assert "already" in str(_all("llama").why_not(training))


def test_a_parameter_from_elsewhere_gets_its_gradient() -> None:
    plain, fitted = build_training(_net(BorrowingBlock)), build_training(_net(BorrowingBlock))
    for training in (plain, fitted):
        for block in training.model[2:]:
            block.borrowed = lambda model=training.model: model[0].bias
    Recompute(modes={"2": "block", "3": "block"}).apply(fitted)
    (_, expected), (_, found) = gradients(plain), gradients(fitted)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_parameter_from_elsewhere_that_the_sample_did_not_show_is_noticed() -> None:
    training = build_training(_net(BorrowingBlock))
    for block in training.model[2:]:
        block.borrowed = lambda: torch.ones(())
    Recompute(modes={"2": "block"}).apply(training)
    training.model[2].borrowed = lambda: training.model[0].bias
    with pytest.raises(NotApplicable, match="neither its argument nor its own parameter"):
        gradients(training)


@pytest.mark.parametrize(("mode", "reason"), [("3:aten.sin.default", r"was aten\.sin\.default"), (4000, "4000")])
def test_operators_that_are_not_the_profiled_ones_are_refused(mode: int | str, reason: str) -> None:
    training = build_training(CASES["llama"])
    with pytest.raises(NotApplicable, match=rf"model\.layers\.0 calls other operators.*{reason}"):
        Recompute(modes={"model.layers.1": "block", "model.layers.0": [mode]}).apply(training)
    assert not any("forward" in vars(block) for block in training.model.model.layers)


def test_a_block_that_fails_when_it_runs_again_leaves_the_generators_alone() -> None:
    training = build_training(_net(FailingBlock))
    Recompute(modes={"2": "block"}).apply(training)
    loss = training.loss(training.model, training.sample)
    before = torch.get_rng_state()
    training.model[2].fails = True
    with pytest.raises(RuntimeError, match="as told"):
        loss.backward()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in training.model[2].parameters())


def test_every_second_block() -> None:
    model = CASES["llama"]()[0]
    assert list(Recompute.every(model, 2).modes) == ["model.layers.0", "model.layers.2"]


def test_a_stepper_that_clips_sees_the_same_gradients() -> None:
    assert_same_training(CASES["vit"], _all("vit"), steps=3, clip_norm=0.1)


@pytest.fixture(scope="module")
def virtual_peaks() -> dict[str, Any]:
    return peaks("recompute")


def test_on_the_virtual_gpu_it_peaks_where_pytorchs_own_checkpoint_does(virtual_peaks: dict[str, Any]) -> None:
    """Theirs lets go of each kept tensor a moment earlier, before a bias's gradient is summed."""
    assert virtual_peaks["slices=1"] < 1.1 * virtual_peaks["checkpoint"] < 0.5 * virtual_peaks["plain"]


def test_on_the_virtual_gpu_slices_divide_what_one_block_takes(virtual_peaks: dict[str, Any]) -> None:
    whole, half, quarter = (virtual_peaks[f"slices={slices}"] for slices in (1, 2, 4))
    # Halving a second time saves half of what the first time did, less one slice's gradients of the parameters.
    assert whole > half > quarter
    assert whole - half == pytest.approx(2 * (half - quarter), rel=0.25)


def test_on_the_virtual_gpu_fewer_bytes_kept_mean_a_lower_peak(virtual_peaks: dict[str, Any]) -> None:
    least, *_, most = choices = virtual_peaks["choices"]
    assert choices == sorted(choices)
    assert least == virtual_peaks["slices=1"] and most <= 1.02 * virtual_peaks["plain"]


def test_on_the_virtual_gpu_trying_chosen_operators_keeps_no_inputs(virtual_peaks: dict[str, Any]) -> None:
    """Activations that are to leave for the host are still on the GPU then."""
    blocks, by_operators = virtual_peaks["placing"]
    assert by_operators < 1.1 * blocks
