"""What is read of a configuration: the same as transformers reads, or a clear refusal."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serve.models.tiny import CASES, SERVED, make_model, transformers
from tonnage.errors import BadModel, UnknownModel
from tonnage.models.presets import preset_config
from tonnage.serve.models.architecture import LayerConfig, architecture_of, read_architecture

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}


@pytest.mark.parametrize("preset", SERVED)
def test_a_published_configuration_reads_as_transformers_saves_it(preset: str) -> None:
    config = dict(preset_config(preset))
    saved = transformers.AutoConfig.for_model(**config).to_dict()
    saved["architectures"] = config.get("architectures")
    published, again = architecture_of({"eos_token_id": 1, **config}), architecture_of({**saved, "eos_token_id": 1})
    assert published == again
    assert read_architecture(preset).layers == published.layers


@pytest.mark.parametrize("case", CASES)
def test_old_names_of_rotary_fields_mean_the_same(case: str) -> None:
    config = json.loads(make_model(case).config.to_json_string(use_diff=False))
    rope = config.pop("rope_parameters")
    old = {**config, "rope_theta": rope.pop("rope_theta", None), "rope_scaling": _old(rope)}
    if "full_attention" in rope:
        full, local = rope["full_attention"], rope["sliding_attention"]
        old |= {
            "rope_theta": full["rope_theta"],
            "rope_local_base_freq": local["rope_theta"],
            "rope_scaling": _old(full),
        }
        rope = {"full_attention": full, "sliding_attention": local}
    else:
        rope["rope_theta"] = old["rope_theta"]
    assert architecture_of(old) == architecture_of({**config, "rope_parameters": rope})


def _old(rope: dict[str, Any]) -> dict[str, Any] | None:
    named = {name: value for name, value in rope.items() if name not in ("rope_type", "rope_theta")}
    return {**named, "type": rope["rope_type"]} if rope.get("rope_type", "default") != "default" else None


def test_windows_and_experts_are_where_the_configuration_puts_them() -> None:
    gemma = read_architecture("gemma-3-1b").layers
    assert [layer.window for layer in gemma[:7]] == [512] * 5 + [0, 512]
    assert gemma[0].rope.theta == 1e4 and gemma[5].rope.theta == 1e6
    qwen = preset_config("qwen3-30b-a3b") | {"num_hidden_layers": 6, "decoder_sparse_step": 3, "mlp_only_layers": [5]}
    assert [layer.sparse for layer in architecture_of(qwen).layers] == [False, False, True, False, False, False]
    assert {layer.window for layer in read_architecture("llama-3.1-8b").layers} == {0}


def test_yarn_reaches_as_far_as_it_stretches() -> None:
    stretched = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    made = architecture_of({**LLAMA, "max_position_embeddings": 40960, "rope_scaling": stretched})
    assert made.positions == 131072
    assert isinstance(made.layers[0], LayerConfig) and made.layers[0].rope.amplitude == pytest.approx(1.1386294)


def test_ends_come_from_the_generation_config_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 2}))
    assert read_architecture(tmp_path).eos_ids == {2}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert read_architecture(tmp_path).eos_ids == {2, 7}
    assert architecture_of(LLAMA).eos_ids == frozenset()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mamba"}, "'mamba'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "'longrope'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "'low_freq_factor'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -2}}, "'factor'"),
        ({"rope_theta": "many"}, "'rope_theta'"),
        ({"hidden_act": "relu"}, "'relu'"),
        ({"num_key_value_heads": 3}, "3 key heads"),
        ({"head_dim": 15}, "15 wide"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 100_000}, "100,000 layers"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "looks ahead"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, "3 of 2 experts"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": 3}, "mlp_only_layers"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(BadModel, match=named) as caught:
        architecture_of({**LLAMA, **changes})
    assert caught.value.hint


def test_paths_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match=r"has no config\.json"):
        read_architecture(tmp_path)
    with pytest.raises(UnknownModel):
        read_architecture("no-such-model")


def test_reading_needs_no_torch() -> None:
    script = (
        "import sys; from tonnage.serve.models.architecture import read_architecture; read_architecture('gemma-2-9b'); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_quantised_name_is_refused_as_its_checkpoint_would_be():
    with pytest.raises(BadModel, match="quantised"):
        read_architecture("Qwen/Qwen3-0.6B-FP8")
