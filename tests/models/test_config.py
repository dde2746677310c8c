"""Shapes from configurations: what adds up in any of them."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.errors import BadModel
from tonnage.models import find_model, from_config
from tonnage.models.config import stored_format
from tonnage.models.presets import preset_config

sizes = st.integers(1, 64)


@settings(max_examples=60)
@given(
    st.sampled_from(["llama", "qwen2", "qwen3", "mistral", "mixtral", "gemma2", "gpt_neox", "olmo2"]),
    sizes, st.integers(1, 8), st.integers(1, 4), st.integers(1, 6), sizes, st.booleans(),
)  # fmt: skip
def test_parts_sum_to_the_whole(model_type, width, groups, per_group, layers, vocab, tied):
    heads = groups * per_group
    shape = from_config(
        {
            "model_type": model_type,
            "hidden_size": heads * 2 * width,
            "intermediate_size": 3 * width,
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "num_hidden_layers": layers,
            "vocab_size": vocab,
            "tie_word_embeddings": tied,
        }
    )
    outside = shape.embedding_parameters + shape.head_parameters + shape.other_parameters
    assert shape.parameters == outside + sum(layer.parameters for layer in shape.decoder.layers)
    assert shape.exact
    assert shape.tied == tied
    assert shape.embedding_parameters == vocab * heads * 2 * width
    assert shape.head_parameters == (0 if tied else shape.embedding_parameters)
    assert len(shape.decoder.layers) == layers
    assert shape.hidden == heads * 2 * width
    if not model_type.startswith("gpt"):
        assert shape.decoder.layers[0].attention.kv_heads == groups


def test_what_is_no_mapping_is_refused():
    with pytest.raises(BadModel):
        from_config([1, 2])


def test_fields_left_out_are_those_of_the_type():
    assert from_config({"model_type": "gpt2"}).parameters == 124_439_808
    assert from_config({"model_type": "t5"}).parameters == 60_506_624


def test_a_former_name_of_a_field_counts():
    assert from_config({"model_type": "gpt2", "num_hidden_layers": 2}) != from_config({"model_type": "gpt2"})
    assert len(from_config({"model_type": "gpt2", "num_hidden_layers": 2}).decoder.layers) == 2


def test_labels_are_counted():
    few, many = ({"model_type": "vit", "id2label": {str(n): "" for n in range(count)}} for count in (10, 110))
    assert from_config(many).parameters - from_config(few).parameters == 100 * 769


def test_unknown_classes_are_said():
    shape = from_config({"model_type": "gpt2", "architectures": ["GPT2ForEverything"]})
    assert "GPT2ForEverything" in shape.notes[0]


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral", "deepseek_v3", "t5", "bert"])
@settings(max_examples=40)
@given(data=st.data())
def test_no_value_of_a_field_is_a_surprise(model_type, data):
    """Whatever a field holds, there is a shape or a sentence."""
    from tonnage.models.templates import architecture

    name = data.draw(st.sampled_from(sorted(architecture(model_type)["defaults"])))
    odd = st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=3)
    )
    try:
        assert from_config({"model_type": model_type, name: data.draw(odd)}).parameters >= 0
    except BadModel as error:
        assert error.hint


@pytest.mark.parametrize("model_type", ["llama", "never-heard-of"])
@pytest.mark.parametrize("text", ["false", "True", "yes"])
def test_a_text_is_neither_true_nor_false(model_type, text):
    """Python takes "false" for true: embeddings would be tied that are not."""
    with pytest.raises(BadModel, match=f"'tie_word_embeddings' is the text '{text}', not true or false"):
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 8}
        from_config({"model_type": model_type, **sizes, "tie_word_embeddings": text})


def _grouped(kind: str, bits: int = 8) -> dict[str, Any]:
    group = {"weights": {"num_bits": bits, "type": kind}}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("quantized", "found"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "nf4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        (_grouped("float", 4), "nvfp4"),
        (_grouped("int", 4), "int4"),
        ({**_grouped("int", 4), "ignore": ["lm_head", "re:.*self_attn.*"]}, "int4-experts"),
        (_grouped("int"), "int8"),
        (_grouped("float"), "fp8"),
        ({"quant_method": "compressed-tensors", "config_groups": []}, ""),
        ({"quant_method": "gptq", "bits": "four"}, ""),
        ({"quant_method": "something new"}, ""),
        ("fp8", ""),
        (None, ""),
    ],
)  # fmt: skip
def test_formats(quantized: Any, found: str) -> None:
    assert stored_format({"quantization_config": quantized}) == found


def test_a_shape_knows_how_it_is_kept() -> None:
    config = {**preset_config("llama-3.1-8b"), "quantization_config": {"quant_method": "awq", "bits": 4}}
    assert (from_config(config).dtype, find_model("llama-3.1-8b").dtype) == ("int4", "bf16")
    assert {name: find_model(name).dtype for name in ("deepseek-v3", "gpt-oss-20b")} == {
        "deepseek-v3": "fp8", "gpt-oss-20b": "mxfp4",
    }  # fmt: skip
