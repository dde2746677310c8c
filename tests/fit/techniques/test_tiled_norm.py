import pytest
import torch
from torch import Tensor

from fit.cases import CASES, assert_same_training, build_training
from tonnage.fit.technique import NotApplicable
from tonnage.fit.techniques.tiled_mlp import TiledMlp
from tonnage.fit.techniques.tiled_norm import TiledNorm


@pytest.mark.parametrize("tiles", [2, 7])
def test_training_is_the_same(tiles: int) -> None:
    assert_same_training(CASES["llama"], TiledNorm(tiles=tiles))


def test_beside_tiled_feed_forward_layers_training_is_the_same() -> None:
    assert_same_training(CASES["llama"], TiledNorm(tiles=2), TiledMlp(tiles=5))


def test_norms_are_found_inside_and_outside_of_blocks() -> None:
    found = TiledNorm.find(build_training(CASES["llama"]).model)
    assert len(found) == 7
    assert {"model.norm", "model.layers.2.input_layernorm"} < set(found)


def test_copies_in_fp32_are_not_kept() -> None:
    training = build_training(CASES["llama"], dtype=torch.bfloat16)
    norm = training.model.model.norm
    x = torch.randn(2, 40, 32, dtype=torch.bfloat16, requires_grad=True)
    assert _kept_bytes(norm, x) > 2 * x.nbytes
    TiledNorm(tiles=4).apply(training)
    assert _kept_bytes(norm, x) == x.nbytes


def _kept_bytes(norm: torch.nn.Module, x: Tensor) -> int:
    kept: dict[int, int] = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.update({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()}) or t, lambda t: t
    ):
        output = norm(x)
    del output
    return sum(kept.values())


@pytest.mark.parametrize("case", ["gpt2", "vit", "dropout"])
def test_fused_norms_are_left_alone(case: str) -> None:
    training = build_training(CASES[case])
    with pytest.raises(NotApplicable, match="written out operator by operator"):
        TiledNorm().apply(training)
    assert not any("forward" in module.__dict__ for module in training.model.modules())


def test_one_tile_is_refused() -> None:
    assert TiledNorm(tiles=1).why_not(build_training(CASES["llama"])) is not None
