"""Which matrices adapters stand beside, and how many parameters they have."""

import pytest

from tonnage.budget.training.adapters import (
    ALL_LINEAR,
    EXPERTS,
    largest_matrix,
    lora_parameters,
    parse_targets,
    target_words,
)
from tonnage.errors import BadLayout
from tonnage.models import find_model


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("all-linear", ALL_LINEAR),
        ("attention,mlp", ALL_LINEAR),
        ("v_proj, q_proj", ("q_proj", "v_proj")),
        ("experts,attention", ("q_proj", "k_proj", "v_proj", "o_proj", EXPERTS)),
    ],
)
def test_targets_are_read(text: str, targets: tuple[str, ...]) -> None:
    assert parse_targets(text) == targets
    assert parse_targets(target_words(targets)) == targets


def test_other_targets_are_refused() -> None:
    with pytest.raises(BadLayout, match="'lm_head' is no matrix of a block"):
        parse_targets("q_proj,lm_head")


def test_experts_are_adapted_where_they_are_named() -> None:
    shape = find_model("gpt-oss-120b")
    assert lora_parameters(shape, 16, ALL_LINEAR) == (36 * 16 * (2 * (2880 + 4096) + 2 * (2880 + 512)), 0)
    assert lora_parameters(shape, 16, (EXPERTS,)) == (0, 36 * 16 * 128 * 3 * 2 * 2880)


def test_latent_attention_has_five_matrices() -> None:
    deepseek = find_model("deepseek-v3")
    compressed = (7168 + 1536) + (1536 + 128 * 192) + (7168 + 576) + (512 + 128 * 256) + (128 * 128 + 7168)
    assert lora_parameters(deepseek, 1, parse_targets("attention"))[0] == 61 * compressed


def test_shared_experts_are_linear_layers() -> None:
    assert lora_parameters(find_model("deepseek-v3"), 1, parse_targets("mlp")) == (
        3 * 3 * (7168 + 18432) + 58 * 3 * 9216,
        0,
    )


def test_the_largest_matrix_is_an_mlps() -> None:
    assert largest_matrix(find_model("llama-3.1-8b")) == 4096 * 14336
