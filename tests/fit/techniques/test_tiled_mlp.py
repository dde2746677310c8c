import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import torchvision_names  # noqa: F401

# isort: split
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

from fit.cases import CASES, Case, assert_same_training, build_training, take_step
from tonnage.fit.technique import NotApplicable
from tonnage.fit.techniques.compile import Compile
from tonnage.fit.techniques.step_in_backward import StepInBackward
from tonnage.fit.techniques.tiled_mlp import TiledMlp


def _gpt2_without_dropout() -> Case:
    _, batch, loss = CASES["gpt2"]()
    config = GPT2Config(
        vocab_size=96, bos_token_id=0, eos_token_id=0, n_positions=32, n_embd=32, n_layer=3, n_head=4,
        resid_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config), batch, loss


@pytest.mark.parametrize("tiles", [2, 7])
@pytest.mark.parametrize("build", [CASES["llama"], CASES["vit"], _gpt2_without_dropout], ids=["llama", "vit", "gpt2"])
def test_training_is_the_same(build: type, tiles: int) -> None:
    assert_same_training(build, TiledMlp(tiles=tiles))


def test_steps_in_backward_see_each_gradient_once() -> None:
    assert_same_training(CASES["llama"], TiledMlp(tiles=3), StepInBackward())


def test_the_layers_are_found_in_each_block() -> None:
    found = TiledMlp.find(build_training(CASES["llama"]).model)
    assert list(found) == ["model.layers.0.mlp", "model.layers.1.mlp", "model.layers.2.mlp"]


def test_compiled_blocks_around_it_share_their_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda forward, **_: real(forward, dynamic=False, backend="aot_eager"))
    assert_same_training(CASES["llama"], TiledMlp(tiles=3), Compile(), steps=2, tolerance=1e-6)
    training = build_training(CASES["llama"])
    torch._dynamo.reset()
    TiledMlp(tiles=3).apply(training)
    Compile().apply(training)
    counters.clear()
    take_step(training, 0)
    # One graph before the layer and one after it, for all blocks together.
    assert counters["stats"]["unique_graphs"] == 2


def test_active_dropout_is_refused_and_nothing_changes() -> None:
    training = build_training(CASES["gpt2"])
    with pytest.raises(NotApplicable, match=r"transformer.h.0.mlp drops at random"):
        TiledMlp().apply(training)
    assert not any("forward" in module.__dict__ for module in training.model.modules())


def test_a_model_without_such_layers_is_refused() -> None:
    reason = TiledMlp().why_not(build_training(CASES["dropout"]))
    assert reason is not None
    assert reason.startswith("No block has a feed-forward layer")


def test_experts_are_refused() -> None:
    config = MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    _, batch, loss = CASES["llama"]()
    reason = TiledMlp().why_not(build_training(lambda: (MixtralForCausalLM(config), batch, loss)))
    assert reason is not None


class TokenMixer(nn.Module):
    """Named like a feed-forward layer, but each row sees the others."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x)) + x.mean(dim=1, keepdim=True)


def test_a_layer_that_mixes_rows_is_refused() -> None:
    training = build_training(CASES["llama"])
    training.model.model.layers[1].mlp = TokenMixer().double()
    reason = TiledMlp().why_not(training)
    assert reason is not None
    assert reason.startswith("model.layers.1.mlp gives other values")


def test_one_tile_is_refused() -> None:
    assert TiledMlp(tiles=1).why_not(build_training(CASES["llama"])) is not None
