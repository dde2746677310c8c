import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from fit.cases import CASES, assert_same_parameters, assert_same_training, build_training, take_step
from tonnage.fit.modules import find_blocks
from tonnage.fit.technique import NotApplicable
from tonnage.fit.techniques import compile as technique
from tonnage.fit.techniques.compile import Compile


def test_dropout_draws_the_same_numbers() -> None:
    assert_same_training(CASES["dropout"], Compile())


def test_training_is_the_same_but_for_the_norms_in_fp32() -> None:
    """Llama's norms compute in FP32 whatever the model's type, and a fused mean adds in another order."""
    assert_same_training(CASES["llama"], Compile(), tolerance=1e-6)


def test_equal_blocks_share_one_compilation() -> None:
    training = build_training(CASES["llama"])
    torch._dynamo.reset()
    undo = Compile().apply(training)
    counters.clear()
    take_step(training, 0)
    undo()
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_undo_restores_forwards_limits_and_cache() -> None:
    training = build_training(CASES["llama"])
    limits = torch._dynamo.config.recompile_limit, torch._dynamo.config.accumulated_recompile_limit
    undo = Compile(blocks=("model.layers.1",)).apply(training)
    changed = [name for name, block in find_blocks(training.model).items() if "forward" in block.__dict__]
    assert changed == ["model.layers.1"]
    assert training.model.config.use_cache is False
    undo()
    assert not any("forward" in block.__dict__ for block in training.model.modules())
    assert training.model.config.use_cache is True
    assert (torch._dynamo.config.recompile_limit, torch._dynamo.config.accumulated_recompile_limit) == limits


def test_a_compilation_that_fails_goes_on_eagerly_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: object, inputs: object) -> object:
        raise RuntimeError("this backend is broken")

    real = torch.compile
    plain, fitted = build_training(CASES["dropout"]), build_training(CASES["dropout"])
    Compile().why_not(fitted)  # the compiler works; only the blocks' compilation fails
    monkeypatch.setattr(torch, "compile", lambda forward, dynamic, options: real(forward, backend=broken))
    torch._dynamo.reset()
    Compile().apply(fitted)
    with pytest.warns(UserWarning, match="this backend is broken") as caught:
        for step in range(2):
            take_step(plain, step)
            take_step(fitted, step)
    assert len(caught) == 1
    assert_same_parameters(plain.model, fitted.model, 0.0)


def test_errors_of_the_block_itself_are_not_swallowed() -> None:
    training = build_training(CASES["dropout"])
    Compile().apply(training)
    training.sample["x"] = torch.zeros(4, 6, 9, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="shape"):
        take_step(training, 0)


def test_without_a_compiler_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(technique, "compiler_problem", lambda kind: "torch.compile does not work here: no g++")
    with pytest.raises(NotApplicable, match=r"no g\+\+"):
        Compile().apply(build_training(CASES["dropout"]))


def test_hooks_inside_a_block_are_refused() -> None:
    training = build_training(CASES["dropout"])
    training.model.blocks[1].up.register_forward_hook(lambda module, inputs, output: None)
    reason = Compile().why_not(training)
    assert reason is not None
    assert reason.startswith("blocks.1.up carries hooks")


def test_a_model_without_blocks_is_refused() -> None:
    training = build_training(CASES["dropout"])
    training.model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    reason = Compile().why_not(training)
    assert reason is not None
    assert "no repeated blocks" in reason


def test_cuda_graphs_are_refused() -> None:
    reason = Compile(mode="reduce-overhead").why_not(build_training(CASES["dropout"]))
    assert reason is not None
    assert "CUDA graphs" in reason


def test_a_forward_put_in_place_before_is_the_one_compiled() -> None:
    training = build_training(CASES["dropout"])
    block = training.model.blocks[0]
    called: list[int] = []

    def doubled(x: Tensor) -> Tensor:
        called.append(1)
        return 2 * x

    block.forward = doubled
    undo = Compile(blocks=("blocks.0",)).apply(training)
    x = torch.ones(1, 2, 24, dtype=torch.float64)
    assert torch.equal(block(x), 2 * x)
    undo()
    assert block.forward is doubled
