"""SGLang's flags, and `sglang.sh`, which serves with them. Written for the command line of SGLang 0.5.18.

Replicas on one host use SGLang's data parallelism: one server spreads requests over them. Several hosts find each other
by `HEAD` and `RANK`.
"""

from tonnage.budget.serving.weights import WEIGHT_FORMATS
from tonnage.planner.export.launch import ServingLaunch, reasons, served_model, shell_script

FILE = "sglang.sh"
PORT = 30000
_RENDEZVOUS_PORT = 20000
_CACHES = {"fp32": "auto", "fp16": "auto", "bf16": "bf16", "fp8": "fp8_e4m3"}
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def obstacles(launch: ServingLaunch) -> list[str]:
    """Return what the flags cannot express."""
    mlx = WEIGHT_FORMATS[launch.weights].container == "mlx"
    return reasons(
        (launch.kv not in _CACHES, f"SGLang keeps no KV cache in {launch.kv}"),
        (mlx, "SGLang reads no MLX checkpoint: name another of this model"),
    )


def notes(launch: ServingLaunch) -> list[str]:
    """Return what the script needs."""
    quantized = WEIGHT_FORMATS[launch.weights].quantized and launch.weights not in ("fp8", launch.stored)
    return reasons((quantized, f"SGLang reads {launch.weights} from the checkpoint: name one that was quantized so"))


def command(launch: ServingLaunch) -> list[str]:
    """Return the command line for one host."""
    chosen: dict[str, object] = {
        "--model-path": served_model(launch),
        "--tp-size": launch.tp,
        **({"--pp-size": launch.pp} if launch.pp > 1 else {}),
        **({"--dp-size": launch.copies_on_a_host} if launch.copies_on_a_host > 1 else {}),
        "--context-length": launch.context,
        "--mem-fraction-static": f"{launch.utilization:g}",
        "--max-running-requests": launch.max_seqs * launch.copies_on_a_host,
        "--chunked-prefill-size": launch.batched_tokens,
        "--kv-cache-dtype": _CACHES[launch.kv],
    }
    if launch.weights == "fp8" and launch.stored != "fp8":
        chosen["--quantization"] = "fp8"
    elif launch.weights in _DTYPES:
        chosen["--dtype"] = _DTYPES[launch.weights]
    words = [str(word) for pair in chosen.items() for word in pair]
    return ["python", "-m", "sglang.launch_server", *words, *(["--disable-cuda-graph"] if launch.eager else [])]


def render(launch: ServingLaunch) -> str:
    """Return the script."""
    if launch.hosts == 1:
        return shell_script(FILE, command(launch), f"--port {PORT}")
    joined = f'--nnodes {launch.hosts} --node-rank "$RANK" --dist-init-addr "$HEAD:{_RENDEZVOUS_PORT}" --port {PORT}'
    return shell_script(FILE, command(launch), joined, given=("HEAD", "RANK"))
