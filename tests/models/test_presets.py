"""Presets by the names that people use, and the sizes that their publishers state."""

from pathlib import Path

import pytest

from tonnage.budget.serving.weights import WEIGHT_FORMATS
from tonnage.errors import UnknownModel
from tonnage.models import all_presets, find_model
from tonnage.models.presets import find_preset, hub_id, read_name

ROWS = [
    line.split()
    for line in (Path(__file__).parent / "data" / "popular-ids.txt").read_text().splitlines()
    if not line.startswith("#")
]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-13b", 13_015_864_320),
        ("llama-2-70b", 68_976_648_192),
        ("mistral-7b", 7_241_732_096),
        ("mixtral-8x7b", 46_702_792_704),
        ("mixtral-8x22b", 140_620_634_112),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-72b", 72_706_203_648),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("gemma-2b", 2_506_172_416),
        ("gemma-2-9b", 9_241_705_984),
        ("gemma-3-1b", 999_885_952),
        ("gemma-3-4b", 4_300_079_472),
        ("gemma-3-12b", 12_187_325_040),
        ("gemma-3-27b", 27_432_406_640),
        ("deepseek-v2-lite", 15_706_484_224),
        ("deepseek-v2", 235_741_434_880),
        # The published 671,026,419,200 has 256 × 58 correction biases, which transformers keeps as buffers.
        ("deepseek-v3", 671_026_419_200 - 256 * 58),
        ("phi-2", 2_779_683_840),
        ("phi-3-mini", 3_821_079_552),
        ("phi-3.5-moe", 41_873_153_344),
        ("phi-4", 14_659_507_200),
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("gpt-j-6b", 6_050_882_784),
        ("gpt-oss-20b", 20_914_757_184),
        ("gpt-oss-120b", 116_829_156_672),
        ("pythia-12b", 11_846_072_320),
        ("opt-350m", 331_196_416),
        ("falcon-7b", 6_921_720_704),
        ("falcon-40b", 41_303_293_952),
        ("bloom-176b", 176_247_271_424),
        ("bert-base", 109_514_298),
        ("bge-large", 335_141_888),
        ("t5-small", 60_506_624),
        ("t5-11b", 11_307_321_344),
        ("bart-large", 406_291_456),
        ("whisper-tiny", 37_760_640),
        ("vit-base", 86_567_656),
        ("vit-large", 304_326_632),
        ("clip-vit-large-patch14", 427_616_513),
        ("smollm2-135m", 134_515_008),
        ("granite-4.0-micro", 3_402_836_480),
        ("mistral-small-3.1-24b", 24_011_361_280),
        ("qwen2.5-vl-7b", 8_292_166_656),
        ("qwen3-vl-30b-a3b", 31_070_754_032),
        ("llava-1.6-mistral-7b", 7_566_747_648),
        ("nemotron-nano-9b-v2", 8_888_227_328),
        ("dbrx", 131_596_523_520),
        ("qwen2-vl-2b", 2_208_985_600),
        ("qwen2-vl-7b", 8_291_375_616),
        ("qwen2.5-vl-3b", 3_754_622_976),
        ("qwen2.5-vl-32b", 33_452_718_336),
        ("qwen2.5-vl-72b", 73_410_777_344),
        ("qwen3-vl-2b", 2_127_532_032),
        ("qwen3-vl-4b", 4_437_815_808),
        ("qwen3-vl-8b", 8_767_123_696),
        ("qwen3-embedding-0.6b", 595_776_512),
        ("qwen3-embedding-4b", 4_021_774_336),
        ("qwen3-embedding-8b", 7_567_295_488),
        ("llama-3.2-11b-vision", 10_670_220_835),
        ("embeddinggemma-300m", 302_863_104),
        ("all-minilm-l6-v2", 22_713_216),
        ("all-minilm-l12-v2", 33_360_000),
        ("all-mpnet-base-v2", 109_486_464),
        ("bge-base-en-v1.5", 109_482_240),
        ("bge-large-en-v1.5", 335_141_888),
        ("bge-m3", 567_754_752),
        ("multilingual-e5-small", 117_653_760),
        ("multilingual-e5-base", 278_043_648),
        ("multilingual-e5-large", 559_890_432),
    ],
)
def test_published_sizes(name, parameters):
    assert find_model(name).parameters == parameters


def test_gpt3_is_the_sum_of_its_paper():
    shape = find_model("gpt3-175b")
    width, layers = 12288, 96
    layer = 12 * width**2 + 13 * width
    assert shape.parameters == layers * layer + (50257 + 2048) * width + 2 * width


@pytest.mark.parametrize(
    ("asked", "key"),
    [
        ("llama3.1-70B", "llama-3.1-70b"),
        ("Llama 3.1 70B", "llama-3.1-70b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b"),
        ("Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("gpt2_medium", "gpt2-medium"),
        ("openai-community/gpt2", "gpt2"),
        ("facebook/opt-1.3b", "opt-1.3b"),
        ("facebook/opt-13b", "opt-13b"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-v3"),
        ("google-bert/bert-base-uncased", "bert-base"),
        ("google/vit-base-patch16-224", "vit-base"),
    ],
)
def test_names(asked, key):
    shape = find_preset(asked)
    assert shape is not None
    assert shape.name == key


def test_every_preset_is_exact_and_adds_up():
    for name in all_presets():
        shape = find_model(name)
        assert shape.exact, name
        assert not shape.notes, (name, shape.notes)
        assert shape.parameters > 10**6
        assert 0 < shape.active_parameters <= shape.parameters
        assert all(layer.parameters > 0 for stack in shape.stacks for layer in stack.layers), name


@pytest.mark.parametrize(
    ("key", "published"),
    [
        ("qwen3-8b", "Qwen/Qwen3-8B"),
        ("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B"),
        ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M"),
        ("yi-34b", "01-ai/Yi-34B"),
        ("falcon3-7b", "tiiuae/Falcon3-7B-Base"),
    ],
)
def test_hub_ids_keep_their_case(key, published):
    assert hub_id(key) == published


def test_an_unknown_name_offers_the_closest():
    with pytest.raises(UnknownModel) as error:
        find_model("llama-3.1-71b")
    assert "llama-3.1-70b" in error.value.hint


def test_mixtures_say_what_a_token_passes():
    assert find_model("mixtral-8x7b").active_parameters == 12_879_925_248
    assert round(find_model("deepseek-v3").active_parameters / 1e9) == 38  # 37 without the embedding


def test_gemma_slides_in_five_layers_of_six():
    layers = find_model("gemma-3-27b").decoder.layers
    assert [layer.attention.window for layer in layers[:7]] == [1024] * 5 + [0, 1024]


def test_encoders_look_both_ways_and_decoders_back():
    encoder, decoder = find_model("t5-base").stacks
    assert (encoder.causal, decoder.causal) == (False, True)
    assert decoder.layers[0].cross_attention is not None
    assert encoder.layers[0].cross_attention is None
    assert not find_model("bert-base").decoder.causal
    assert find_model("gpt2").decoder.causal


def test_latent_attention():
    attention = find_model("deepseek-v3").decoder.layers[0].attention
    assert (attention.kind, attention.latent_rank, attention.rope_dim) == ("latent", 512, 64)


def test_hybrids_keep_states():
    kinds = [str(layer.attention.kind) for layer in find_model("qwen3-next-80b-a3b").decoder.layers[:4]]
    assert kinds == ["recurrent"] * 3 + ["full"]


def test_formats_and_positions_are_the_publishers() -> None:
    assert find_model("kimi-k2").dtype == find_model("deepseek-v3").dtype == "fp8"
    assert find_model("whisper-large-v3").max_positions == 448
    learned = {name for name in ("gpt2", "opt-125m", "bart-base", "whisper-tiny") if find_model(name).learned_positions}
    assert learned == {"gpt2", "opt-125m", "bart-base", "whisper-tiny"}
    # Its vocabulary is as large as its context is long.
    assert not find_model("mistral-nemo-12b").learned_positions


def test_the_head_of_a_language_model_beside_a_tower_is_a_head() -> None:
    shape = find_model("llama-4-scout")
    assert shape.head_parameters == 202048 * 5120 and not shape.tied


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
