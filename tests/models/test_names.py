"""Hub names of quantised and fine-tuned models: what they are of, and how their weights are kept."""

from pathlib import Path

import pytest

from tonnage.budget.weights import WEIGHT_FORMATS
from tonnage.errors import UnknownModel
from tonnage.models import find_model
from tonnage.models.names import read_name
from tonnage.models.presets import find_preset, hub_id

ROWS = [
    line.split()
    for line in (Path(__file__).parent / "data" / "popular-ids.txt").read_text().splitlines()
    if not line.startswith("#")
]


@pytest.mark.parametrize(("asked", "preset", "weights"), ROWS, ids=[row[0] for row in ROWS])
def test_popular_ids(asked, preset, weights):
    shape = find_preset(asked)
    assert (shape.name, shape.dtype) == (preset, weights) if shape else (preset, weights) == ("-", "-")
    assert shape is None or shape.parameters == find_model(preset).parameters


def test_enough_of_them_are_known():
    assert len(ROWS) == 100
    assert sum(preset != "-" for _, preset, _ in ROWS) >= 95


@pytest.mark.parametrize(
    ("asked", "preset", "weights"),
    [
        ("someone/Llama-3.1-8B-Instruct-FP8", "llama-3.1-8b", "fp8"),
        ("mistral-7b-instruct-v0.2.Q4_K_M.gguf", "mistral-7b-v0.2", "q4_k_m"),
        ("unsloth/Qwen3-8B-GGUF/Qwen3-8B-Q8_0.gguf", "qwen3-8b", "q8_0"),
        ("bartowski/Llama-3.3-70B-Instruct-GGUF:IQ3_XXS", "llama-3.3-70b", "iq3_xxs"),
        ("Qwen2.5-7B-Instruct-AWQ", "qwen2.5-7b", "int4"),
        ("someone/Qwen2.5-7B-Instruct-abliterated-bnb-4bit", "qwen2.5-7b", "nf4"),
        ("nvidia/Qwen3-8B-NVFP4", "qwen3-8b", "nvfp4"),
        ("mlx-community/Qwen3-8B-8bit", "qwen3-8b", "mlx-8bit"),
        ("moonshotai/Kimi-K2-Thinking", "kimi-k2-thinking", "int4-experts"),
        ("Qwen/Qwen3-VL-8B-Thinking-FP8", "qwen3-vl-8b", "fp8"),
    ],
)
def test_other_names(asked, preset, weights):
    shape = find_model(asked)
    assert (shape.name, shape.dtype) == (preset, weights)
    assert shape.dtype in WEIGHT_FORMATS


@pytest.mark.parametrize(
    "asked",
    [
        "someone/llama-3.1-8b-lora",
        "xtuner/llava-llama-3-8b-v1_1",
        "intfloat/e5-mistral-7b-instruct",
        "zai-org/GLM-4-9B-0414",
        "someone/Mistral-Small-2409-GGUF",
        "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
        "someone/Llama-3.1-8B-Instruct-GPTQ-3bit",
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-3B",
        "nvidia/Llama-3.1-Minitron-4B-Width-Base",
        "./runs/llama-3.1-8b",
    ],
)
def test_what_is_not_known_is_not_guessed(asked):
    assert find_preset(asked) is None


def test_a_launch_names_the_checkpoint_that_was_asked_for():
    assert hub_id("Qwen/Qwen2.5-7B-Instruct-AWQ") == "Qwen/Qwen2.5-7B-Instruct-AWQ"
    assert hub_id("Qwen2.5-7B-Instruct-AWQ") == "Qwen2.5-7B-Instruct-AWQ"


def test_a_gguf_repository_says_which_file_is_counted():
    assert any(":Q8_0" in note for note in find_model("unsloth/Qwen3-8B-GGUF").notes)
    assert not find_model("unsloth/Qwen3-8B-GGUF:Q8_0").notes


def test_a_gguf_file_is_known_by_its_name(tmp_path):
    file = tmp_path / "Qwen3-0.6B-Q8_0.gguf"
    file.write_bytes(b"GGUF")
    assert find_model(str(file)).name == "qwen3-0.6b"


def test_formats_of_names_are_formats_of_weights():
    for said in ("x-awq", "x-nf4", "x-w8a8", "x-fp8", "x-nvfp4", "x-gguf"):
        assert read_name(said).weights in WEIGHT_FORMATS


def test_a_fine_tune_of_unknown_words_is_told_what_it_may_be() -> None:
    with pytest.raises(UnknownModel) as caught:
        find_model("someone/My-Qwen2.5-7B-Instruct-kto")
    assert "If it is a fine-tune of qwen2.5-7b and of its shape, plan qwen2.5-7b." in caught.value.hint
