"""TensorRT-LLM's flags, the options that have none (`tensorrt_llm.yaml`), and `tensorrt_llm.sh`, which serves with both.

Written for `trtllm-serve` of TensorRT-LLM 1.2 with its PyTorch backend.
"""

from typing import Any

from tonnage.budget.serving.weights import WEIGHT_FORMATS
from tonnage.planner.export.launch import ServingLaunch, reasons, served_model, shell_script
from tonnage.planner.export.text import to_yaml

FILE = "tensorrt_llm.sh"
OPTIONS = "tensorrt_llm.yaml"
PORT = 8000
_CACHES = {"fp32": "auto", "fp16": "auto", "bf16": "auto", "fp8": "fp8"}


def obstacles(launch: ServingLaunch) -> list[str]:
    """Return what the flags cannot express."""
    container = WEIGHT_FORMATS[launch.weights].container
    return reasons(
        (launch.kv not in _CACHES, f"TensorRT-LLM keeps no KV cache in {launch.kv}"),
        (bool(container), f"TensorRT-LLM reads no {container.upper()} checkpoint: name another of this model"),
        (launch.hosts > 1, "trtllm-serve over several hosts is started by MPI or Slurm: see trtllm-llmapi-launch"),
    )


def notes(launch: ServingLaunch) -> list[str]:
    """Return what the script needs."""
    quantized = WEIGHT_FORMATS[launch.weights].quantized and launch.weights != launch.stored
    words = f"TensorRT-LLM reads {launch.weights} from the checkpoint: name one that was quantized so"
    return [words] if quantized else []


def command(launch: ServingLaunch) -> list[str]:
    """Return the command line."""
    chosen: dict[str, object] = {
        "--backend": "pytorch",
        "--tp_size": launch.tp,
        "--pp_size": launch.pp,
        "--max_batch_size": launch.max_seqs,
        "--max_num_tokens": launch.batched_tokens,
        "--max_seq_len": launch.context,
        "--kv_cache_free_gpu_memory_fraction": f"{launch.utilization:g}",
        "--extra_llm_api_options": OPTIONS,
    }
    return ["trtllm-serve", served_model(launch), *(str(word) for pair in chosen.items() for word in pair)]


def options(launch: ServingLaunch) -> str:
    """Return the options that have no flag, as YAML."""
    cache: dict[str, Any] = {
        "dtype": _CACHES[launch.kv],
        "tokens_per_block": launch.block or 32,
        "free_gpu_memory_fraction": launch.utilization,
    }
    return to_yaml({"kv_cache_config": cache} | ({"cuda_graph_config": None} if launch.eager else {}))


def render(launch: ServingLaunch) -> str:
    """Return the script."""
    return shell_script(FILE, command(launch), f"--port {PORT}", here=True)
