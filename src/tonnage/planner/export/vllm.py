"""vLLM's flags, and `vllm.sh`, which serves one replica with them. Written for the command line of vLLM 0.32.

One GPU needs no executor, several in one host use vLLM's own processes, several hosts use Ray, which `vllm_ray` starts.
Replicas on one host are numbered by `COPY`, which picks their GPUs and port.
"""

import shlex
from pathlib import Path

from tonnage.budget.serving.weights import WEIGHT_FORMATS
from tonnage.models.presets import hub_id
from tonnage.planner.export.launch import ServingLaunch, reasons
from tonnage.planner.export.launch import served_model as named_model

FILE = "vllm.sh"
PORT = 8000
RAY_PORT = 6379
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
# "auto" is the compute dtype.
_CACHES = {"fp32": "auto", "fp16": "float16", "bf16": "bfloat16", "fp8": "fp8", "int4": "int4_per_token_head"}


def obstacles(launch: ServingLaunch) -> list[str]:
    """Return what the flags cannot express."""
    return reasons(
        (launch.kv not in _CACHES, f"vLLM keeps no KV cache in {launch.kv}"),
        (WEIGHT_FORMATS[launch.weights].container == "mlx", "vLLM reads no MLX checkpoint: name another of this model"),
    )


def notes(launch: ServingLaunch) -> list[str]:
    """Return what the script needs."""
    # All formats but FP8 are quantized before loading.
    form, per_host = WEIGHT_FORMATS[launch.weights], launch.gpus_per_host
    quantized = form.quantized and launch.weights not in ("fp8", launch.stored)
    across = f"tensor parallelism of {launch.tp} crosses hosts of {per_host} GPUs: every layer waits for the network"
    stages = f"layers of the pipeline stages are {', '.join(map(str, launch.stage_layers))}"
    return reasons(
        (quantized, f"vLLM reads {launch.weights} from the checkpoint: name one that was quantized so"),
        (form.container == "gguf", "vLLM reads GGUF files by a plugin: pip install vllm-gguf-plugin"),
        (launch.hosts > 1 and per_host % launch.tp != 0, across),
        (bool(launch.stage_layers), f"{stages}: VLLM_PP_LAYER_PARTITION says so"),
    )


def render(launch: ServingLaunch) -> str:
    """Return the script."""
    usage, copies = "bash vllm.sh [FLAG]...", launch.copies_on_a_host
    lines = [f"export {pair}" for pair in environment(launch)]
    if launch.hosts > 1:
        usage = "HEAD=ADDRESS bash vllm.sh [FLAG]...: on the head, when Ray has all hosts. start-head.sh runs it."
        lines += [
            ': "${HEAD:?set HEAD to the address of the head}"',
            'VLLM_HOST_IP=${VLLM_HOST_IP:-$(python3 "$(dirname "$0")/check.py" address)}',
            f'export HEAD VLLM_HOST_IP RAY_ADDRESS="$HEAD:{RAY_PORT}"',
        ]
    if copies > 1:
        where = f"one copy on {launch.gpus} of this host's GPUs. COPY is 0 to {copies - 1}."
        usage = f"COPY=0 bash vllm.sh [FLAG]...: {where}"
        first = "copy" if launch.gpus == 1 else f"copy * {launch.gpus}"
        lines += [
            "copy=${COPY:-0}",
            f"CUDA_VISIBLE_DEVICES=$(seq -s, $(({first})) $(({first} + {launch.gpus - 1})))",
            "export CUDA_VISIBLE_DEVICES",
        ]
    chosen = lines_of(launch) + ([f'--port "$(({PORT} + copy))"'] if copies > 1 else [])
    command = " \\\n  ".join(["exec vllm serve", shlex.quote(served_model(launch)), *chosen, '"$@"'])
    return "\n".join(["#!/usr/bin/env bash", f"# {usage}", "set -euo pipefail", *lines, command, ""])


def served_model(launch: ServingLaunch) -> str:
    """Return the model's name or path, or a GGUF file's name on the hub."""
    if WEIGHT_FORMATS[launch.weights].container == "gguf" and Path(launch.model).suffix != ".gguf":
        return launch.model if ":" in launch.model else f"{launch.model}:{launch.weights.upper()}"
    return named_model(launch)


def environment(launch: ServingLaunch) -> list[str]:
    """Return the environment variables that the plan relies on, as `NAME=value`."""
    counts = ",".join(map(str, launch.stage_layers))
    return [f"VLLM_PP_LAYER_PARTITION={counts}"] if counts else []


def flags(launch: ServingLaunch) -> list[str]:
    """Return the arguments after the model."""
    return [word for line in lines_of(launch) for word in line.split(" ")]


def lines_of(launch: ServingLaunch) -> list[str]:
    """Return one flag with its value per line."""
    chosen: dict[str, object] = {
        "--tensor-parallel-size": launch.tp,
        "--pipeline-parallel-size": launch.pp,
        **({"--distributed-executor-backend": "ray" if launch.hosts > 1 else "mp"} if launch.gpus > 1 else {}),
        "--max-model-len": launch.context,
        "--max-num-seqs": launch.max_seqs,
        "--max-num-batched-tokens": launch.batched_tokens,
        "--gpu-memory-utilization": launch.utilization,
        **({"--block-size": launch.block} if launch.block else {}),
        "--kv-cache-dtype": _CACHES[launch.kv],
    }
    # FP8 may be quantized while loading; other formats are the checkpoint's.
    if WEIGHT_FORMATS[launch.weights].container == "gguf":
        chosen["--tokenizer"] = hub_id(launch.tokenizer)
    elif launch.weights == "fp8" and launch.stored != "fp8":
        chosen["--quantization"] = "fp8"
    elif launch.weights in _DTYPES:
        chosen["--dtype"] = _DTYPES[launch.weights]
    return [f"{name} {value}" for name, value in chosen.items()] + ["--enforce-eager"] * launch.eager
