"""Formats by the words of real configurations."""

from typing import Any

import pytest

from tonnage.models import find_model, from_config
from tonnage.models.presets import preset_config
from tonnage.models.stored import stored_format


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
