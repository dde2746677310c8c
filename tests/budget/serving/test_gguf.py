"""GGUF files by tensor, beside the sizes that llama.cpp prints of public files."""

import pytest

from tonnage.budget.serving.gguf import GgufRecipe, file_types, row_bytes
from tonnage.budget.serving.weights import WEIGHT_FORMATS
from tonnage.models import all_presets, find_model
from tonnage.units import GIB


@pytest.mark.parametrize(
    ("model", "kind", "gib"),
    [
        ("llama-3.1-8b", "q4_k_m", 4.58),
        ("llama-3.1-8b", "q8_0", 7.95),
        ("llama-3.1-8b", "q5_k_m", 5.33),
        ("llama-3.1-8b", "iq3_m", 3.52),
        ("llama-3.1-8b", "q2_k", 2.95),
        ("llama-3.3-70b", "q4_k_m", 39.59),
        ("llama-2-7b", "q4_0", 3.56),
        ("qwen2.5-32b", "q4_k_m", 18.48),
        ("qwen3-30b-a3b", "q4_k_m", 17.28),
        ("gpt-oss-20b", "mxfp4", 11.27),
        ("qwen2.5-7b", "q8_0", 7.54),
        ("phi-4", "q4_k_m", 8.43),  # queries, keys and values in one matrix
        ("gpt-oss-120b", "mxfp4", 59.02),
        ("deepseek-r1", "q4_k_m", 376.65),
    ],
)
def test_the_size_of_a_file(model: str, kind: str, gib: float) -> None:
    assert GgufRecipe(find_model(model), kind).file_bytes / GIB == pytest.approx(gib, abs=0.006)


def test_rows_fall_back_where_blocks_do_not_divide_them() -> None:
    assert row_bytes("q4_k", 512) == 288
    assert row_bytes("q4_k", 2880) == row_bytes("q5_0", 2880) == 90 * 22
    assert row_bytes("f16", 7) == 14


def test_half_of_the_layers_of_a_medium_file_have_more_bits() -> None:
    recipe = GgufRecipe(find_model("llama-3.1-8b"), "q4_k_m")
    kinds = [recipe.kind("down", number) for number in range(32)]
    assert (kinds.count("q6_k"), kinds.count("q4_k")) == (16, 16)
    assert kinds[:4] == kinds[-4:] == ["q6_k"] * 4


def test_every_type_of_file_is_a_format_of_weights_and_is_near_its_bits() -> None:
    shape = find_model("llama-3.1-8b")
    for name in set(file_types()) - {"mxfp4"}:
        bits = GgufRecipe(shape, name).file_bytes * 8 / shape.parameters
        assert bits == pytest.approx(WEIGHT_FORMATS[name].bits, rel=0.06), name


@pytest.mark.parametrize("name", sorted(all_presets()))
def test_every_preset_has_a_file(name: str) -> None:
    shape = find_model(name)
    recipe = GgufRecipe(shape, "q4_k_m")
    assert recipe.file_bytes >= 0.4 * sum(layer.parameters for layer in shape.decoder.layers)
