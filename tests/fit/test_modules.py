"""Copies of a fitted model are plain models of their own, and blocks are found where people put them."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import torchvision_names  # noqa: F401
from fit.cases import CASES
from tonnage.fit.modules import active_dropout, dropouts

# isort: split
from transformers import ResNetConfig, ResNetModel, SwinConfig, SwinModel, T5Config, T5ForConditionalGeneration

from fit.cases import build_training, llama
from tonnage.fit.modules import find_blocks, replace_forward, uncompiled
from tonnage.fit.techniques.activation_offload import ActivationOffload
from tonnage.fit.techniques.chunked_loss import ChunkedLoss
from tonnage.fit.techniques.recompute import Recompute
from tonnage.fit.techniques.tiled_mlp import TiledMlp
from tonnage.fit.training import Training


def fitted() -> Training:
    training = build_training(llama)
    blocks = tuple(find_blocks(training.model))
    for technique in (TiledMlp(), ChunkedLoss(), Recompute.all(training.model), ActivationOffload(blocks=blocks[:1])):
        technique.apply(training)
    return training


def loss_of(training: Training, model: nn.Module) -> torch.Tensor:
    return training.loss(model, training.sample)


def test_a_copy_computes_with_its_own_weights_and_keeps_its_gradients() -> None:
    training = fitted()
    twin = copy.deepcopy(training.model)
    torch.testing.assert_close(loss_of(training, twin), loss_of(training, training.model), rtol=1e-12, atol=0)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.3)
    plain = build_training(llama).model
    plain.load_state_dict(twin.state_dict())
    loss = loss_of(training, twin)
    torch.testing.assert_close(loss, loss_of(training, plain), rtol=1e-12, atol=0)
    loss.backward()
    assert all(parameter.grad is None for parameter in training.model.parameters())
    assert all(parameter.grad is not None for parameter in twin.parameters())


def test_an_average_of_weights_is_evaluated_with_the_average() -> None:
    training = fitted()
    average = AveragedModel(training.model)
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.add_(0.05)
    average.update_parameters(training.model)
    plain = build_training(llama).model
    plain.load_state_dict(average.module.state_dict())
    torch.testing.assert_close(loss_of(training, average.module), loss_of(training, plain), rtol=1e-12, atol=0)


def test_a_model_that_is_saved_whole_is_plain_when_it_is_loaded() -> None:
    training = build_training(llama)
    for technique in (ChunkedLoss(), Recompute.all(training.model)):
        technique.apply(training)
    file = io.BytesIO()
    torch.save(training.model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    torch.testing.assert_close(loss_of(training, loaded), loss_of(training, training.model), rtol=1e-12, atol=0)
    assert type(loss_of(training, loaded).grad_fn).__name__ == "NllLossBackward0"


def test_a_forward_of_its_own_stays_with_a_copy() -> None:
    module = nn.Linear(2, 2)
    module.forward = double
    undo = replace_forward(module, lambda x: x * 3)
    assert copy.deepcopy(module)(torch.ones(2)).tolist() == [2.0, 2.0]
    undo()
    assert module.forward is double


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_blocks_whose_parts_stand_in_a_list_are_found_and_stages_are_not_blocks() -> None:
    t5 = T5ForConditionalGeneration(
        T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=50, num_decoder_layers=2)
    )
    assert list(find_blocks(t5)) == ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]
    swin = SwinModel(
        SwinConfig(embed_dim=8, depths=[2, 2], num_heads=[1, 2], image_size=32, patch_size=2, window_size=2)
    )
    assert all(".blocks." in name for name in find_blocks(swin))
    resnet = ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2]))
    assert list(find_blocks(resnet)) == [f"encoder.stages.{stage}.layers.{k}" for stage in range(2) for k in range(2)]


@pytest.mark.filterwarnings("ignore")
def test_modules_compiled_in_place_run_plainly_meanwhile() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.compile(backend="eager")
    compiled = model._compiled_call_impl
    undo = uncompiled(model)
    assert model._compiled_call_impl is None
    undo()
    assert model._compiled_call_impl is compiled


@pytest.mark.parametrize(
    ("case", "expected"),
    [("llama", None), ("vit", None), ("gpt2", "transformer.drop"), ("dropout", "blocks.0.dropout")],
)
def test_models_that_drop_are_told_from_others(case: str, expected: str | None) -> None:
    model, _, _ = CASES[case]()
    assert active_dropout(model.train()) == expected
    assert active_dropout(model.eval()) is None
    assert bool(dropouts(model)) == (expected is not None)


class Attention(nn.Module):
    """Holds its rate as a number, as transformers' attention does."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.attention_dropout = rate


@pytest.mark.parametrize(
    ("module", "drops"),
    [
        (Attention(0.1), True),
        (Attention(0.0), False),
        (nn.Dropout(0.0), False),
        (nn.Dropout2d(0.5), True),
        (nn.AlphaDropout(0.5), True),
        (nn.MultiheadAttention(8, 2, dropout=0.1), True),
        (nn.MultiheadAttention(8, 2), False),
        (nn.GRU(4, 4, num_layers=2, dropout=0.2), True),
    ],
)
def test_each_kind_of_dropout_is_known(module: nn.Module, drops: bool) -> None:
    assert (active_dropout(module) is not None) == drops
    assert active_dropout(module.eval()) is None
