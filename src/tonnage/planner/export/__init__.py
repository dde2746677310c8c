"""Export a plan as files that launch it: `launch.sh` starts what was exported, README.txt lists it.

A target that cannot express the plan is left out, and README.txt says why; nothing is exported that would silently
train differently. Files are not overwritten unless asked, and all are rendered before any is written.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

from tonnage.errors import OutputExists, RequestError
from tonnage.planner.export import (
    accelerate,
    deepspeed,
    llama_cpp,
    sglang,
    tensorrt_llm,
    torchrun,
    torchtitan,
    train_script,
    training_arguments,
    vllm,
    vllm_ray,
)
from tonnage.planner.export.launch import ServingLaunch, TrainingRun
from tonnage.planner.export.text import to_json, to_toml, to_yaml

__all__ = ["ServingLaunch", "TrainingRun", "export_serving", "export_training", "left_out"]

LAUNCH = "launch.sh"
README = "README.txt"
# Engines started by a single script; vLLM's also has Ray and a check.
SERVERS = {"sglang": sglang, "tensorrt-llm": tensorrt_llm, "llama.cpp": llama_cpp}


class Target(NamedTuple):
    """A file that launches a training: what it is for, its text, what it cannot express, and how it differs."""

    file: str
    purpose: str
    render: Callable[[TrainingRun], str]
    obstacles: Callable[[TrainingRun], list[str]] = lambda _: []
    notes: Callable[[TrainingRun], list[str]] = lambda _: []


_TARGETS = (
    Target(
        training_arguments.FILE, "Hugging Face TrainingArguments", lambda run: to_json(training_arguments.settings(run)),
        training_arguments.obstacles, training_arguments.notes,
    ),
    Target(
        train_script.FILE, "a script that reads them", train_script.render, train_script.obstacles, train_script.notes
    ),
    Target(
        deepspeed.FILE, "DeepSpeed's configuration", lambda run: to_json(deepspeed.settings(run)), deepspeed.obstacles,
        deepspeed.notes,
    ),
    Target(
        accelerate.FSDP_FILE, "accelerate launch --config_file, with FSDP2", lambda run: to_yaml(accelerate.settings(run)),
        accelerate.obstacles, accelerate.notes,
    ),
    Target(
        accelerate.DEEPSPEED_FILE, "accelerate launch --config_file, with DeepSpeed",
        lambda run: to_yaml(accelerate.deepspeed_settings(run)), deepspeed.obstacles,
    ),
    Target(
        torchtitan.FILE, "torchtitan 0.2.2: --job.config_file", lambda run: to_toml(torchtitan.settings(run)),
        torchtitan.obstacles, torchtitan.notes,
    ),
    Target(torchrun.FILE, "torchrun with this many hosts and processes", torchrun.render),
    Target(
        torchrun.ENVIRONMENT, "variables to set first, PYTORCH_ALLOC_CONF among them", torchrun.environment
    ),
)  # fmt: skip
_PURPOSES = {target.file: target.purpose for target in _TARGETS} | {
    vllm.FILE: "vllm serve with its flags",
    vllm_ray.HEAD: "Ray's head, then vllm.sh when all hosts are there",
    vllm_ray.WORKER: "joins the head, on every other host",
    vllm_ray.COPIES: "vllm.sh for every copy of a host",
    sglang.FILE: "sglang.launch_server with its flags",
    tensorrt_llm.FILE: "trtllm-serve with its flags",
    tensorrt_llm.OPTIONS: "options that have no flag: --extra_llm_api_options",
    llama_cpp.FILE: "llama-server with its flags",
    vllm_ray.CHECK: "waits for hosts and server, says who is missing",
}


def export_training(plan: TrainingRun, directory: Path, *, force: bool = False) -> list[Path]:
    """Write every file that can express the plan. Returns their paths, `launch.sh` and `README.txt` last."""
    omitted = left_out(plan)
    chosen = [target for target in _TARGETS if target.file not in omitted]
    texts = {target.file: target.render(plan) for target in chosen}
    notes = {target.file: target.notes(plan) for target in chosen}
    texts[LAUNCH] = _launch_script(plan, list(texts))
    texts[README] = _read_me(plan, list(texts), notes, omitted)
    return _write(texts, directory, force=force)


def export_serving(plan: ServingLaunch, directory: Path, *, force: bool = False) -> list[Path]:
    """Write the scripts that serve and check. Returns their paths, the server's first and `README.txt` last."""
    omitted, server = left_out(plan), SERVERS.get(plan.engine, vllm)
    texts = {} if omitted else {server.FILE: server.render(plan)}
    if server is tensorrt_llm and not omitted:
        texts[tensorrt_llm.OPTIONS] = tensorrt_llm.options(plan)
    if server is vllm and not omitted:
        texts |= vllm_ray.render(plan)
    notes = {} if server is vllm and omitted else {server.FILE: server.notes(plan)}
    texts[README] = _read_me(plan, list(texts), notes, omitted)
    return _write(texts, directory, force=force)


def left_out(plan: TrainingRun | ServingLaunch) -> dict[str, list[str]]:
    """Return the files that cannot express the plan, each with the reasons."""
    if isinstance(plan, ServingLaunch):
        server = SERVERS.get(plan.engine, vllm)
        found = {server.FILE: server.obstacles(plan)}
    else:
        found = {target.file: target.obstacles(plan) for target in _TARGETS}
    return {name: list(dict.fromkeys(reasons)) for name, reasons in found.items() if reasons}


def _launch_script(launch: TrainingRun, exported: Sequence[str]) -> str:
    """Return a script that starts the first of these that exists: train.py, torchtitan, a script of the user's."""
    given, config = "", {"fsdp2": accelerate.FSDP_FILE, "deepspeed": accelerate.DEEPSPEED_FILE}.get(launch.engine, "")
    if train_script.FILE in exported:
        usage, given = "bash launch.sh TOKENS: train.py.", 'tokens=$(realpath "${1:?give a file of tokens}")\n'
        start = f'exec bash {torchrun.FILE} {train_script.FILE} "$tokens"'
    elif torchtitan.FILE in exported:
        usage = "bash launch.sh [OPTION]...: torchtitan, with the tokenizer in ./assets."
        module = f"-m {torchtitan.MODULE} --job.config_file {torchtitan.FILE}"
        start = f'exec bash {torchrun.FILE} {module} "$@"'
    else:
        usage = "bash launch.sh SCRIPT [ARG]...: a script of yours."
        given = 'script=$(realpath "${1:?give a script}")\nshift\n'
        start = f'exec bash {torchrun.FILE} "$script" "$@"'
        if config in exported:
            start = f'exec accelerate launch --config_file {config} "$script" "$@"'
        if config in exported and launch.cluster.hosts > 1:
            rank = '"${RANK:?set RANK to the number of this host, from 0}"'
            start = f""": "${{HEAD:?set HEAD to the address of the first host}}" {rank}
exec accelerate launch --config_file {config} \\
  --machine_rank "$RANK" --main_process_ip "$HEAD" --main_process_port {torchrun.PORT} "$script" "$@\""""
    return f"""#!/usr/bin/env bash
# {usage}
set -euo pipefail
{given}cd "$(dirname "$0")"
# shellcheck source=/dev/null
source ./{torchrun.ENVIRONMENT}
{start}
"""


def _read_me(
    launch: TrainingRun | ServingLaunch,
    exported: Sequence[str],
    notes: Mapping[str, Sequence[str]],
    omitted: Mapping[str, Sequence[str]],
) -> str:
    """Return what was exported, what differs from the plan, and what was left out and why."""
    if isinstance(launch, ServingLaunch):
        headline = vllm_ray.headline(launch)
    else:
        config, sizes = launch.configuration, launch.sizes
        layout = f"tp {sizes.tp}, pp {sizes.pp}, cp {sizes.cp}, ep {sizes.ep}, data {sizes.data}"
        batch = f"{sizes.micro_batch} × {sizes.accumulate} × {sizes.data} sequences of {sizes.seq} tokens a step"
        headline = (
            f"{launch.model} on {sizes.gpus} × {launch.cluster.gpu.name}: {layout} in shards of {sizes.shard}; "
            f"{config.precision}, {config.optimizer}, ZeRO {config.zero} ({config.framework}), "
            f"recomputation {config.checkpoint}; {batch}."
        )
    parts = [_wrapped(headline)]
    parts.append("\n".join(f"{name:<27}{_PURPOSES[name]}" for name in exported if name in _PURPOSES))
    if isinstance(launch, ServingLaunch) and not omitted:
        parts += vllm_ray.parts(launch)
    differs = [_wrapped(f"{name}: {note}.") for name, said in notes.items() for note in said]
    if differs:
        parts.append("\n".join(["To know", "-------", *differs]))
    missing = [_wrapped(f"{name}: {'; '.join(said)}.") for name, said in omitted.items()]
    if missing:
        parts.append("\n".join(["Left out", "--------", *missing]))
    return "\n\n".join(parts) + "\n"


def _wrapped(text: str) -> str:
    return fill(text, width=80, subsequent_indent="  ", break_on_hyphens=False)


def _write(texts: Mapping[str, str], directory: Path, *, force: bool) -> list[Path]:
    paths = [directory / name for name in texts]
    if directory.exists() and not directory.is_dir():
        raise RequestError(f"{directory} is a file, not a folder.", hint="Name a folder for the files to launch with.")
    found = ", ".join(path.name for path in paths if path.exists())
    if found and not force:
        hint = "Choose another folder, or pass --force to replace them."
        raise OutputExists(f"{directory} holds {found} already.", hint=hint)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, texts.values(), strict=True):
            path.write_text(text, encoding="utf-8")
            if path.suffix == ".sh":
                path.chmod(0o755)
    except OSError as error:
        problem = f"Cannot write {error.filename}: {error.strerror}."
        raise RequestError(problem, hint="Name a folder that you can write to.") from None
    return paths
