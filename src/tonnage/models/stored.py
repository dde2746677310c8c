"""The format of a checkpoint's weights, by the `quantization_config` that its publisher supplied.

| method                                        | format                              |
|-----------------------------------------------|-------------------------------------|
| fp8, fbgemm_fp8                               | fp8                                 |
| modelopt                                      | fp8 or nvfp4, as it says            |
| awq, gptq, auto-round                         | int4 or int8, as it says            |
| bitsandbytes                                  | nf4 or int8, as it says             |
| compressed-tensors                            | that of its first group of weights; int4-experts if attention is left out |
| mxfp4                                         | mxfp4: the experts alone            |
"""

from collections.abc import Mapping
from typing import Any

_PLAIN = {"fp8": "fp8", "fbgemm_fp8": "fp8", "modelopt": "fp8", "mxfp4": "mxfp4", "finegrained_fp8": "fp8"}
_BY_BITS = {4: "int4", 8: "int8"}


def stored_format(config: Mapping[str, Any]) -> str:
    """Return the format of the quantized matrices; "" if nothing is quantized, or in an unknown way."""
    quantized = config.get("quantization_config")
    if not isinstance(quantized, Mapping):
        return ""
    method = str(quantized.get("quant_method", ""))
    if method == "compressed-tensors":
        return _of_group(quantized)
    if method == "modelopt" and "FP4" in str(quantized.get("quant_algo", "")):
        return "nvfp4"
    if method == "bitsandbytes":
        return "nf4" if quantized.get("load_in_4bit") else "int8"
    return _PLAIN.get(method) or _BY_BITS.get(_whole(quantized.get("bits", quantized.get("w_bit"))), "")


def _of_group(quantized: Mapping[str, Any]) -> str:
    groups = quantized.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    if not isinstance(weights, Mapping):
        return ""
    if weights.get("type") == "float":
        return {8: "fp8", 4: "nvfp4"}.get(_whole(weights.get("num_bits")), "")
    form = _BY_BITS.get(_whole(weights.get("num_bits")), "")
    left_out = quantized.get("ignore")
    attention = isinstance(left_out, list) and any("self_attn" in str(name) for name in left_out)
    return "int4-experts" if form == "int4" and attention else form


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0
