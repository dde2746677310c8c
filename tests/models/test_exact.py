"""Counts against models that transformers builds, from published and from varied configurations."""

import json
import random

import pytest

from models import zoo
from tonnage.models import all_presets, find_model, from_config
from tonnage.models.presets import preset_config
from tonnage.models.templates import architecture

TYPES = """
llama qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next mistral mixtral gemma gemma2 gemma3_text gemma3 deepseek_v2 deepseek_v3
phi phi3 phimoe gpt2 openai-gpt gpt_neo gpt_neox gptj gpt_bigcode opt falcon bloom mpt stablelm starcoder2 olmo olmo2
olmoe cohere cohere2 granite glm glm4 glm4_moe gpt_oss smollm3 nemotron llama4_text mamba mamba2 jamba codegen
bert roberta distilbert electra deberta deberta-v2 albert modernbert xlm-roberta
t5 bart mbart pegasus whisper vit deit clip siglip swin resnet convnext beit
""".split()
# Fields that only make sense together with what the variation changes.
TOGETHER = {
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "mamba2": {"hidden_size": 4096},
    "nemotron": {"num_key_value_heads": 8, "head_dim": 128},
}
# One preset of each family and size class; every preset is held against its published count elsewhere.
PRESETS = [name for number, name in enumerate(all_presets()) if number % 4 == 0]


@pytest.mark.parametrize("model_type", TYPES)
def test_a_varied_configuration_is_counted_as_transformers_builds_it(model_type):
    row = architecture(model_type)
    head = next(iter(row["heads"]))
    tried = 0
    for seed in range(8):
        rng = random.Random(f"{model_type}-{seed}")
        values = zoo.varied(row["defaults"], rng) | TOGETHER.get(model_type, {})
        try:
            config = zoo.config_of(model_type, values)
            expected = zoo.built(head, config)
        except Exception:  # transformers refuses these numbers together, each model in its own way
            continue
        saved = json.loads(config.to_json_string(use_diff=bool(seed % 2))) | {"architectures": [head]}
        shape = from_config(saved)
        assert (shape.parameters, shape.exact) == (expected, True), saved
        tried += 1
        if tried == 2:
            break
    assert tried, "no variation could be built"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_counted_as_transformers_builds_it(name):
    config = dict(preset_config(name))
    architecture_name = config["architectures"][0].replace("MPT", "Mpt")
    expected = zoo.built(architecture_name, zoo.config_of(config.pop("model_type"), config))
    assert find_model(name).parameters == expected


@pytest.mark.parametrize(
    ("model_type", "head"),
    [
        ("llama", "LlamaModel"),
        ("llama", "LlamaForSequenceClassification"),
        ("gpt2", "GPT2Model"),
        ("bert", "BertModel"),
        ("bert", "BertForSequenceClassification"),
        ("bert", "BertForPreTraining"),
        ("roberta", "RobertaForTokenClassification"),
        ("t5", "T5Model"),
        ("vit", "ViTModel"),
        ("bart", "BartModel"),
    ],
)
def test_another_head_is_counted_by_its_class(model_type, head):
    config = zoo.config_of(model_type, {"num_labels": 7})
    saved = json.loads(config.to_json_string()) | {"architectures": [head]}
    assert from_config(saved).parameters == zoo.built(head, config)


def test_a_part_of_another_type_is_counted_as_that_type():
    text = {"model_type": "qwen2", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3,
            "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1000}  # fmt: skip
    config = zoo.config_of("llava", {"text_config": text})
    saved = json.loads(config.to_json_string()) | {"architectures": ["LlavaForConditionalGeneration"]}
    assert from_config(saved).parameters == zoo.built("LlavaForConditionalGeneration", config)


@pytest.mark.parametrize(
    ("model_type", "values"),
    [
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False, "num_kv_heads": 71}),
        ("falcon", {"new_decoder_architecture": True, "multi_query": False, "bias": True}),
        ("opt", {"_remove_final_layer_norm": True}),
        ("opt", {"do_layer_norm_before": False, "_remove_final_layer_norm": True}),
        ("deberta-v2", {"legacy": False, "tie_word_embeddings": False}),
        ("granitemoehybrid", {"num_hidden_layers": 4, "layer_types": ["mamba", "attention", "mamba", "mamba"]}),
        ("granitemoehybrid", {"num_hidden_layers": 2, "layer_types": ["attention"] * 2, "num_local_experts": 0}),
        ("nemotron_h", {"hybrid_override_pattern": "M-M*ME"}),
        ("dbrx", {"attn_config": {"kv_n_heads": 8, "rope_theta": 5e5}, "n_layers": 3}),
        ("esm", {"vocab_size": 33, "mask_token_id": 32, "pad_token_id": 1, "token_dropout": False}),
        ("ministral", {"head_dim": 128, "num_hidden_layers": 3}),
    ],
)
def test_switches_that_only_matter_together(model_type, values):
    head = next(iter(architecture(model_type)["heads"]))
    expected = zoo.built(head, zoo.config_of(model_type, values))
    shape = from_config({"model_type": model_type, "architectures": [head], **values})
    assert shape.parameters == expected


def test_a_published_vision_model_may_keep_its_text_fields_outside():
    config = dict(preset_config("qwen2.5-vl-7b"))
    flat = {**config.pop("text_config"), **config}
    assert from_config(flat).parameters == find_model("qwen2.5-vl-7b").parameters == 8_292_166_656


# Sizes of the towers that people train: base, small, tiny with other images, unusual poolers.
SIZES = [
    {},
    {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536},
    {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768, "image_size": 384, "patch_size": 32},
    {"image_size": [224, 224], "patch_size": [16, 16]},
]


# transformers builds no BEiT with sides that are stated one by one.
NO_CLASS = [(name, values) for name in ("vit", "deit", "dinov2") for values in SIZES]
NO_CLASS += [("beit", values) for values in SIZES[:3]]


@pytest.mark.parametrize(("model_type", "values"), NO_CLASS, ids=str)
@pytest.mark.parametrize("shortened", [True, False])
def test_a_vision_model_that_names_no_class_is_the_bare_one(model_type, values, shortened):
    """As `AutoModel.from_config` builds it; one that states its classes is a classifier."""
    config = zoo.config_of(model_type, values)
    saved = json.loads(config.to_json_string(use_diff=shortened))
    saved.pop("architectures", None)
    shape = from_config(saved)
    first = next(iter(architecture(model_type)["heads"]))
    bare = first.replace("ForImageClassification", "Model")
    assert (shape.parameters, shape.exact) == (zoo.built(bare, config), True)
    assert shape.notes == (f"The configuration names no class; counted as {bare}.",)
    classes = zoo.config_of(model_type, values | {"num_labels": 1000})
    saved = json.loads(classes.to_json_string(use_diff=shortened))
    saved.pop("architectures", None)
    assert from_config(saved).parameters == zoo.built(first, classes)
