"""llama.cpp's flags, and `llama_cpp.sh`, which serves with them. Written for llama-server of build b10586.

A GGUF file is named by its path; if the model is not a file yet, the script takes the path as `GGUF`.
"""

import shlex
from pathlib import Path

from tonnage.budget.serving.llama_cpp import CACHES, UBATCH
from tonnage.planner.export.launch import ServingLaunch, shell_script

FILE = "llama_cpp.sh"
PORT = 8080


def obstacles(launch: ServingLaunch) -> list[str]:
    """Return nothing: every plan has flags."""
    return []


def notes(launch: ServingLaunch) -> list[str]:
    """Return what the script needs."""
    named = Path(launch.model).suffix == ".gguf"
    return [] if named else [f"GGUF=PATH names the file, of type {launch.weights.upper()}"]


def file_name(launch: ServingLaunch) -> str:
    """Return the file, or its usual name."""
    if Path(launch.model).suffix == ".gguf":
        return str(Path(launch.model).resolve()) if Path(launch.model).exists() else launch.model
    return f"{Path(launch.model).name}-{launch.weights.upper()}.gguf"


def command(launch: ServingLaunch) -> list[str]:
    """Return the command line."""
    users = launch.max_seqs
    words = ["llama-server", "-m", file_name(launch), "-c", str(users * launch.context), "-np", str(users)]
    words += ["-ngl", str(launch.gpu_layers)] if launch.gpu_layers else ["-ngl", "0", "--device", "none"]
    words += ["--n-cpu-moe", str(launch.cpu_experts)] if launch.cpu_experts else []
    words += ["-ub", str(launch.batched_tokens)] if launch.batched_tokens != UBATCH else []
    words += ["-fa", "on" if launch.flash_attention else "off"]
    return [*words, "-ctk", CACHES[launch.kv], "-ctv", CACHES[launch.kv]]


def render(launch: ServingLaunch) -> str:
    """Return the script; GGUF in its environment names another file."""
    name, script = file_name(launch), shell_script(FILE, command(launch), f"--port {PORT}")
    return script.replace(f"-m {shlex.quote(name)}", f'-m "${{GGUF:-{name}}}"')
