"""Models from files, good and bad."""

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from models import zoo
from tonnage.errors import BadModel, RequestError, UnknownModel
from tonnage.models import find_model, from_config

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def write(path, value):
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def tensors_of(model_type, architecture, values):
    """Zeros in the shapes of the real model."""
    config = zoo.config_of(model_type, values)
    with zoo.quiet(), torch.device("meta"), zoo.no_init_weights():
        model = getattr(zoo.transformers, architecture)(config)
        model.tie_weights()
    return {name: torch.zeros(parameter.shape, dtype=torch.bfloat16) for name, parameter in model.named_parameters()}


@pytest.fixture
def weights():
    return tensors_of("llama", "LlamaForCausalLM", {k: v for k, v in LLAMA.items() if k != "model_type"})


def test_a_config_file_and_its_folder(tmp_path):
    path = write(tmp_path / "config.json", LLAMA)
    assert find_model(str(path)).parameters == find_model(str(tmp_path)).parameters == from_config(LLAMA).parameters
    assert find_model(str(path)).name == tmp_path.name


def test_a_checkpoint_by_its_header(tmp_path, weights):
    save_file(weights, tmp_path / "model.safetensors")
    shape = find_model(str(tmp_path / "model.safetensors"))
    assert shape.parameters == sum(tensor.numel() for tensor in weights.values())
    assert (shape.dtype, shape.hidden, len(shape.decoder.layers)) == ("bf16", 64, 3)
    assert shape.decoder.layers[0].feed_forward.intermediate == 128
    assert shape.decoder.layers[0].attention.kv_heads * shape.decoder.layers[0].attention.head_dim == 32
    assert "assumed" in shape.notes[0]


def test_a_checkpoint_with_its_config_is_known_in_full(tmp_path, weights):
    save_file(weights, tmp_path / "model.safetensors")
    write(tmp_path / "config.json", LLAMA)
    shape = find_model(str(tmp_path))
    assert (shape.architecture, shape.notes, shape.dtype) == ("llama", (), "bf16")
    assert shape.decoder.layers[0].attention.heads == 4


def test_the_header_is_enough(tmp_path, weights):
    save_file(weights, tmp_path / "whole.safetensors")
    data = (tmp_path / "whole.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    (tmp_path / "head.safetensors").write_bytes(data[: 8 + length])
    whole, head = (find_model(str(tmp_path / f"{name}.safetensors")) for name in ("whole", "head"))
    assert whole.parameters == head.parameters


def sharded(tmp_path, weights):
    names = sorted(weights)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in halves.items():
        save_file({name: weights[name] for name in held}, tmp_path / file)
    placed = {name: file for file, held in halves.items() for name in held}
    return write(tmp_path / "model.safetensors.index.json", {"metadata": {}, "weight_map": placed})


def test_shards_count_together(tmp_path, weights):
    index = sharded(tmp_path, weights)
    expected = sum(tensor.numel() for tensor in weights.values())
    for path in (index, tmp_path, tmp_path / "model-00002-of-00002.safetensors"):
        assert find_model(str(path)).parameters == expected


def test_missing_shards_are_named(tmp_path, weights):
    index = sharded(tmp_path, weights)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(BadModel, match=r"1 of 2 shards.*model-00002-of-00002"):
        find_model(str(index))
    write(tmp_path / "config.json", LLAMA)
    shape = find_model(str(index))
    assert shape.parameters == sum(tensor.numel() for tensor in weights.values())
    assert "1 of 2 shards" in shape.notes[0]


def test_experts_are_found_in_a_header(tmp_path):
    weights = {f"model.layers.{i}.mlp.experts.{e}.{m}.weight": torch.zeros(8, 4) for i in range(2) for e in range(3)
               for m in ("gate_proj", "up_proj")}  # fmt: skip
    weights |= {
        f"model.layers.{i}.self_attn.{m}.weight": torch.zeros(16, 4) for i in range(2) for m in ("q_proj", "k_proj")
    }
    weights |= {"model.embed_tokens.weight": torch.zeros(10, 4)}
    save_file(weights, tmp_path / "model.safetensors")
    shape = find_model(str(tmp_path))
    layer = shape.decoder.layers[0]
    assert shape.parameters == sum(tensor.numel() for tensor in weights.values())
    assert (layer.feed_forward.experts, layer.expert_parameters) == (3, 64)


@pytest.mark.parametrize(
    "field",
    [
        {"hidden_size": -64},
        {"hidden_size": 0},
        {"hidden_size": 1e30},
        {"hidden_size": 10**30},
        {"hidden_size": float("nan")},
        {"hidden_size": float("inf")},
        {"hidden_size": "64"},
        {"hidden_size": [64]},
        {"hidden_size": {}},
        {"hidden_size": True},
        {"hidden_size": 66},
        {"num_attention_heads": 0},
        {"num_attention_heads": -4},
        {"num_attention_heads": 2.5},
        {"num_key_value_heads": 3},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": "three"},
        {"vocab_size": -5},
        {"intermediate_size": None, "hidden_size": None},
    ],
    ids=str,
)
def test_nonsense_numbers_are_refused(tmp_path, field):
    path = write(tmp_path / "config.json", {**LLAMA, **field})
    with pytest.raises(RequestError) as error:
        find_model(str(path))
    assert error.value.hint


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("hello", "not JSON"),
        ("[1, 2]", "list"),
        ("3", "int"),
        ("[" * 100_000, "deep|not JSON"),
        ('{"a":' * 50_000 + "1" + "}" * 50_000, "deep"),
        ("{}", "does not say"),
        ('{"model_type": "no-such-model"}', "does not say"),
        ('{"model_type": 7}', "does not say"),
        (f'{{"hidden_size": {"9" * 5000}}}', "not JSON"),
    ],
    ids=range(11),
)
def test_what_is_no_configuration(tmp_path, text, said):
    path = write(tmp_path / "config.json", text)
    with pytest.raises(BadModel, match=said):
        find_model(str(path))


def test_a_binary_file(tmp_path):
    (tmp_path / "config.json").write_bytes(bytes(range(256)))
    with pytest.raises(BadModel, match="not text"):
        find_model(str(tmp_path))


def test_a_config_of_ten_gigabytes_is_not_read(tmp_path):
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(10 * 10**9)
    with pytest.raises(BadModel, match="holds more than 16 MiB"):
        find_model(str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01\x02",
        struct.pack("<Q", 0),
        struct.pack("<Q", 100 * 10**9) + b"{}",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 500) + b'{"a": 1',
        struct.pack("<Q", 4) + b"[1 ]",
        struct.pack("<Q", 4) + b"\xff\xfe\xfd\xfc",
        struct.pack("<Q", 9) + b'{"a": 12}',
        struct.pack("<Q", 39) + b'{"a": {"dtype": "F32", "shape": [-1]}}  ',
        struct.pack("<Q", 2) + b"{}",
    ],
    ids=range(11),
)
def test_damaged_headers(tmp_path, data):
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(BadModel):
        find_model(str(path))


def test_an_empty_folder_and_missing_paths(tmp_path):
    with pytest.raises(BadModel, match="holds no model"):
        find_model(str(tmp_path))
    for missing in (tmp_path / "config.json", tmp_path / "a" / "b"):
        with pytest.raises(UnknownModel, match="no file or folder"):
            find_model(str(missing))
    with pytest.raises(UnknownModel):
        find_model("x" * 5000)
    with pytest.raises(UnknownModel):
        find_model("a\0b")
    with pytest.raises(UnknownModel):
        find_model("")


def test_shards_must_lie_beside_their_index(tmp_path):
    index = write(tmp_path / "model.safetensors.index.json", {"weight_map": {"a": "../elsewhere.safetensors"}})
    with pytest.raises(BadModel, match="outside"):
        find_model(str(index))


def test_a_lone_shard_is_not_the_model(tmp_path, weights):
    save_file(weights, tmp_path / "model-00001-of-00004.safetensors")
    with pytest.raises(BadModel, match="one shard of 4"):
        find_model(str(tmp_path / "model-00001-of-00004.safetensors"))


def test_a_hub_id_needs_online():
    with pytest.raises(UnknownModel):
        find_model("somebody/some-model-of-theirs")


def test_an_unknown_architecture_says_that_it_is_not_exact():
    shape = from_config(
        {**LLAMA, "model_type": "brand_new", "architectures": ["BrandNewForCausalLM"], "rms_norm_eps": 1e-5}
    )
    assert not shape.exact
    assert "brand_new" in shape.notes[0]
    assert shape.parameters == from_config(LLAMA).parameters


def test_the_class_names_the_type_where_nothing_else_does():
    assert from_config({k: v for k, v in LLAMA.items() if k != "model_type"}).architecture == "llama"


def test_an_unknown_hub_id_is_told_of_online() -> None:
    with pytest.raises(UnknownModel) as caught:
        find_model("somebody/Something-7B")
    assert "--online" in caught.value.hint


def test_a_pipe_in_place_of_the_weights_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(BadModel, match="pipe or a device"):
        find_model(str(tmp_path))


def test_a_number_of_four_hundred_digits_is_refused() -> None:
    with pytest.raises(BadModel, match="'hidden_size' is 9"):
        from_config({**LLAMA, "hidden_size": int("9" * 400)}, "model")
