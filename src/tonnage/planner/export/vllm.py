"""vLLM's flags: a script that serves the model as planned. Written for the command line of vLLM 0.32."""

import shlex

from tonnage.models.presets import hub_id
from tonnage.planner.export.launch import ServingLaunch, reasons

FILE = "vllm.sh"
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_CACHES = {"fp16": "float16", "bf16": "bfloat16", "fp8": "fp8", "int4": "int4_per_token_head"}
_HOST_GPUS = 8


def obstacles(launch: ServingLaunch) -> list[str]:
    """What its flags cannot say."""
    return reasons(
        (launch.kv not in _CACHES, f"vLLM keeps no KV cache in {launch.kv}"),
        (launch.weights not in (*_DTYPES, "fp8", "int8", "int4", "mxfp4"), f"vLLM has no weights in {launch.weights}"),
    )


def notes(launch: ServingLaunch) -> list[str]:
    """What it needs."""
    return reasons(
        (
            launch.weights in ("int8", "int4"),
            f"vLLM reads {launch.weights} from the checkpoint: name one that was quantized so",
        ),
        (
            launch.gpus > _HOST_GPUS,
            "on several hosts, add --nnodes, --node-rank and --master-addr on each, and --headless on all but one",
        ),
    )


def render(launch: ServingLaunch) -> str:
    """The script."""
    lines = " \\\n  ".join(["exec vllm serve", shlex.quote(hub_id(launch.model)), *lines_of(launch), '"$@"'])
    return f"#!/usr/bin/env bash\nset -euo pipefail\n{lines}\n"


def flags(launch: ServingLaunch) -> list[str]:
    """The words after the model."""
    return [word for line in lines_of(launch) for word in line.split(" ")]


def lines_of(launch: ServingLaunch) -> list[str]:
    """One flag with its value each."""
    chosen: dict[str, object] = {
        "--tensor-parallel-size": launch.tp,
        "--pipeline-parallel-size": launch.pp,
        "--max-model-len": launch.context,
        "--max-num-seqs": launch.max_seqs,
        "--max-num-batched-tokens": launch.batched_tokens,
        "--gpu-memory-utilization": launch.utilization,
        "--block-size": launch.block,
        "--kv-cache-dtype": _CACHES[launch.kv],
        **_weights(launch.weights),
    }
    return [f"{name} {value}" for name, value in chosen.items()] + ["--enforce-eager"] * launch.eager


def _weights(weights: str) -> dict[str, object]:
    """FP8 is made as a checkpoint is loaded; integers are as the checkpoint has them."""
    if weights == "fp8":
        return {"--quantization": "fp8"}
    return {"--dtype": _DTYPES[weights]} if weights in _DTYPES else {}
