"""Batches of other sizes, made of the sample."""

import pytest
import torch
from torch import nn

import torchvision_names  # noqa: F401

# isort: split
from transformers import BatchEncoding, BertConfig, BertModel, LlamaConfig, LlamaModel, RobertaConfig, RobertaModel

from fit.cases import gpt2
from tonnage.errors import RequestError
from tonnage.fit.stepping.batches import BadBatch
from tonnage.fit.survey.growth import Rows, Tokens, learnt_positions, sequence_length

SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 9}


def tokens(sample: object, multiple_of: int = 1, at_most: int | None = None, model: nn.Module | None = None) -> Tokens:
    return Tokens(sample, multiple_of, at_most, dimension=1, model=model or nn.Linear(1, 1))


def test_rows_are_taken_again_and_again() -> None:
    sample = {"x": torch.arange(6).reshape(2, 3), "y": torch.tensor([0, 1]), "scale": torch.ones(5), "name": "a"}
    grown = Rows(sample, 1, None, micro_batches=1).grow(5)
    assert grown["x"].tolist() == [[0, 1, 2], [3, 4, 5], [0, 1, 2], [3, 4, 5], [0, 1, 2]]
    assert grown["y"].tolist() == [0, 1, 0, 1, 0]
    assert grown["scale"] is sample["scale"] and grown["name"] == "a"


def test_tokens_are_taken_again_and_again_and_the_nesting_stays() -> None:
    sample = BatchEncoding(
        {"input_ids": torch.tensor([[1, 2, 3]]), "mask": torch.ones(1, 3, 4), "label": torch.ones(1)}
    )
    grown = tokens(sample).grow(5)
    assert isinstance(grown, BatchEncoding)
    assert grown["input_ids"].tolist() == [[1, 2, 3, 1, 2]]
    assert grown["mask"].shape == (1, 5, 4)
    assert grown["label"].shape == (1,)
    assert sample["input_ids"].shape == (1, 3)
    assert tokens(sample).grow(2)["input_ids"].tolist() == [[1, 2]]


def test_positions_go_on_where_tokens_repeat() -> None:
    sample = {"input_ids": torch.zeros(2, 3), "position_ids": torch.arange(3).repeat(2, 1)}
    assert tokens(sample).grow(5)["position_ids"].tolist() == [[0, 1, 2, 3, 4]] * 2
    assert sample["position_ids"].tolist() == [[0, 1, 2]] * 2


def test_sizes_are_multiples_up_to_the_end() -> None:
    axis = Rows(torch.zeros(2, 3), 4, 30, micro_batches=6)
    assert (axis.smallest, axis.largest) == (12, 24)
    assert axis.first_sizes() == [12, 24]
    assert axis.down(23) == 12
    assert tokens(torch.zeros(2, 3), 64).first_sizes() == [256, 512, 768]
    assert tokens(torch.zeros(2, 3), 8, 100).first_sizes() == [32, 64, 96]
    assert tokens(torch.zeros(2, 3), 64, 100).first_sizes() == [64]


@pytest.mark.parametrize(("multiple_of", "at_most"), [(0, None), (-1, None), (1, 0), (64, 63)])
def test_limits_that_leave_nothing_are_refused(multiple_of: int, at_most: int | None) -> None:
    for axis in (lambda *limits: Rows(*limits, micro_batches=1), tokens):
        with pytest.raises(RequestError):
            axis(torch.zeros(2, 3), multiple_of, at_most)


def test_images_have_no_sequence() -> None:
    with pytest.raises(BadBatch, match="no tensor with a sequence in dimension 1"):
        sequence_length({"x": torch.zeros(2, 3, 8, 8), "y": torch.zeros(2)}, 1)


def test_a_mask_over_pairs_of_tokens_is_refused() -> None:
    with pytest.raises(BadBatch, match="more than one dimension"):
        sequence_length({"x": torch.zeros(2, 7), "mask": torch.zeros(2, 1, 7, 7)}, 1)


def test_the_batch_is_no_sequence() -> None:
    with pytest.raises(RequestError, match="dimension is 0"):
        sequence_length(torch.zeros(2, 7), 0)


def test_learnt_positions_end() -> None:
    model, sample, _ = gpt2()
    assert learnt_positions(model) == 32
    assert tokens(sample, 8, 100, model).largest == 32
    assert learnt_positions(BertModel(BertConfig(max_position_embeddings=48, **SMALL))) == 48
    # Its positions begin after the one of padding.
    assert learnt_positions(RobertaModel(RobertaConfig(max_position_embeddings=50, pad_token_id=1, **SMALL))) == 48


def test_rotated_positions_do_not_end() -> None:
    assert learnt_positions(LlamaModel(LlamaConfig(max_position_embeddings=48, **SMALL))) is None
