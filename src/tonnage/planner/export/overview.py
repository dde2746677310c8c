"""`launch.sh`, which starts what was exported, and `README.txt`, which lists each file and those left out."""

from collections.abc import Mapping, Sequence
from textwrap import fill

from tonnage.planner.export import (
    accelerate_deepspeed,
    accelerate_fsdp,
    environment,
    llama_cpp,
    sglang,
    tensorrt_llm,
    torchrun,
    torchtitan,
    train_script,
    training_arguments,
    vllm,
    vllm_check,
    vllm_ray,
    vllm_readme,
)
from tonnage.planner.export.launch import ServingLaunch, TrainingRun

LAUNCH = "launch.sh"
README = "README.txt"
PURPOSES = {
    environment.FILE: "variables to set first, PYTORCH_ALLOC_CONF among them",
    training_arguments.FILE: "Hugging Face TrainingArguments",
    train_script.FILE: "a script that reads them",
    "deepspeed.json": "DeepSpeed's configuration",
    accelerate_fsdp.FILE: "accelerate launch --config_file, with FSDP2",
    accelerate_deepspeed.FILE: "accelerate launch --config_file, with DeepSpeed",
    torchtitan.FILE: "torchtitan 0.2.2: --job.config_file",
    torchrun.FILE: "torchrun with this many hosts and processes",
    vllm.FILE: "vllm serve with its flags",
    vllm_ray.HEAD: "Ray's head, then vllm.sh when all hosts are there",
    vllm_ray.WORKER: "joins the head, on every other host",
    vllm_ray.COPIES: "vllm.sh for every copy of a host",
    sglang.FILE: "sglang.launch_server with its flags",
    tensorrt_llm.FILE: "trtllm-serve with its flags",
    tensorrt_llm.OPTIONS: "options that have no flag: --extra_llm_api_options",
    llama_cpp.FILE: "llama-server with its flags",
    vllm_check.FILE: "waits for hosts and server, says who is missing",
}


def launch_script(launch: TrainingRun, exported: Sequence[str]) -> str:
    """Return a script that starts the first of these that exists: train.py, torchtitan, a script of the user's."""
    usage, given, start = _start(launch, exported)
    return f"""#!/usr/bin/env bash
# {usage}
set -euo pipefail
{given}cd "$(dirname "$0")"
# shellcheck source=/dev/null
source ./{environment.FILE}
{start}
"""


def _start(launch: TrainingRun, exported: Sequence[str]) -> tuple[str, str, str]:
    """Return its usage, the arguments it reads before changing folders, and the command."""
    if train_script.FILE in exported:
        given = 'tokens=$(realpath "${1:?give a file of tokens}")\n'
        return "bash launch.sh TOKENS: train.py.", given, f'exec bash {torchrun.FILE} {train_script.FILE} "$tokens"'
    if torchtitan.FILE in exported:
        module = f"-m {torchtitan.MODULE} --job.config_file {torchtitan.FILE}"
        usage = "bash launch.sh [OPTION]...: torchtitan, with the tokenizer in ./assets."
        return usage, "", f'exec bash {torchrun.FILE} {module} "$@"'
    given = 'script=$(realpath "${1:?give a script}")\nshift\n'
    return "bash launch.sh SCRIPT [ARG]...: a script of yours.", given, _own_script(launch, exported)


def _own_script(launch: TrainingRun, exported: Sequence[str]) -> str:
    by_engine = {"fsdp2": accelerate_fsdp.FILE, "deepspeed": accelerate_deepspeed.FILE}
    config = by_engine.get(launch.engine, "")
    if config in exported:
        return _accelerate(launch, config)
    return f'exec bash {torchrun.FILE} "$script" "$@"'


def _accelerate(launch: TrainingRun, config: str) -> str:
    if launch.cluster.hosts == 1:
        return f'exec accelerate launch --config_file {config} "$script" "$@"'
    return f""": "${{HEAD:?set HEAD to the address of the first host}}" "${{RANK:?set RANK to the number of this host, from 0}}"
exec accelerate launch --config_file {config} \\
  --machine_rank "$RANK" --main_process_ip "$HEAD" --main_process_port {torchrun.PORT} "$script" "$@\""""


def read_me(
    launch: TrainingRun | ServingLaunch,
    exported: Sequence[str],
    notes: Mapping[str, Sequence[str]],
    omitted: Mapping[str, Sequence[str]],
) -> str:
    """Return what was exported, what differs from the plan, and what was left out and why."""
    parts = [_wrapped(_headline(launch))]
    parts.append("\n".join(f"{name:<27}{PURPOSES[name]}" for name in exported if name in PURPOSES))
    if isinstance(launch, ServingLaunch) and not omitted:
        parts += vllm_readme.parts(launch)
    differs = [_wrapped(f"{name}: {note}.") for name, said in notes.items() for note in said]
    if differs:
        parts.append("\n".join(["To know", "-------", *differs]))
    missing = [_wrapped(f"{name}: {'; '.join(said)}.") for name, said in omitted.items()]
    if missing:
        parts.append("\n".join(["Left out", "--------", *missing]))
    return "\n\n".join(parts) + "\n"


def _headline(launch: TrainingRun | ServingLaunch) -> str:
    if isinstance(launch, ServingLaunch):
        return vllm_readme.headline(launch)
    configuration, sizes = launch.configuration, launch.sizes
    layout = f"tp {sizes.tp}, pp {sizes.pp}, cp {sizes.cp}, ep {sizes.ep}, data {sizes.data} in shards of {sizes.shard}"
    batch = f"{sizes.micro_batch} × {sizes.accumulate} × {sizes.data} sequences of {sizes.seq} tokens a step"
    return (
        f"{launch.model} on {sizes.gpus} × {launch.cluster.gpu.name}: {layout}; {configuration.precision}, "
        f"{configuration.optimizer}, ZeRO {configuration.zero} ({configuration.framework}), "
        f"recomputation {configuration.checkpoint}; {batch}."
    )


def _wrapped(text: str) -> str:
    return fill(text, width=80, subsequent_indent="  ", break_on_hyphens=False)
