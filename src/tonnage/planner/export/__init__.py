"""Export a plan as files that launch it: one module per target, each with `FILE`, `obstacles`, `notes` and `render`.

A target that cannot express the plan is left out, and README.txt says why; nothing is exported that would silently
train differently. Files are not overwritten unless asked, and all are rendered before any is written.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tonnage.errors import OutputExists, RequestError
from tonnage.planner.export import (
    accelerate_deepspeed,
    accelerate_fsdp,
    deepspeed,
    environment,
    llama_cpp,
    overview,
    sglang,
    tensorrt_llm,
    torchrun,
    torchtitan,
    train_script,
    training_arguments,
    vllm,
    vllm_check,
    vllm_ray,
)
from tonnage.planner.export.launch import ServingLaunch, TrainingRun

__all__ = ["ServingLaunch", "TrainingRun", "export_serving", "export_training", "left_out"]

# Engines started by a single script; vLLM's also has Ray and a check.
SERVERS = {"sglang": sglang, "tensorrt-llm": tensorrt_llm, "llama.cpp": llama_cpp}
_TARGETS = (
    training_arguments,
    train_script,
    deepspeed,
    accelerate_fsdp,
    accelerate_deepspeed,
    torchtitan,
    torchrun,
    environment,
)


def export_training(plan: TrainingRun, directory: Path, *, force: bool = False) -> list[Path]:
    """Write every file that can express the plan. Returns their paths, `launch.sh` and `README.txt` last."""
    omitted = left_out(plan)
    chosen = [target for target in _TARGETS if target.FILE not in omitted]
    texts = {target.FILE: target.render(plan) for target in chosen}
    notes = {target.FILE: target.notes(plan) for target in chosen}
    texts[overview.LAUNCH] = overview.launch_script(plan, list(texts))
    texts[overview.README] = overview.read_me(plan, list(texts), notes, omitted)
    return _write(texts, directory, force=force)


def export_serving(plan: ServingLaunch, directory: Path, *, force: bool = False) -> list[Path]:
    """Write the scripts that serve and check. Returns their paths, the server's first and `README.txt` last."""
    omitted = left_out(plan)
    if plan.engine in SERVERS:
        server = SERVERS[plan.engine]
        texts = {} if omitted else {server.FILE: server.render(plan)}
        if server is tensorrt_llm and not omitted:
            texts[tensorrt_llm.OPTIONS] = tensorrt_llm.options(plan)
        texts[overview.README] = overview.read_me(plan, list(texts), {server.FILE: server.notes(plan)}, omitted)
        return _write(texts, directory, force=force)
    texts = (
        {}
        if omitted
        else {vllm.FILE: vllm.render(plan), **vllm_ray.render(plan), vllm_check.FILE: vllm_check.render(plan)}
    )
    notes = {} if omitted else {vllm.FILE: vllm.notes(plan)}
    texts[overview.README] = overview.read_me(plan, list(texts), notes, omitted)
    return _write(texts, directory, force=force)


def left_out(plan: TrainingRun | ServingLaunch) -> dict[str, list[str]]:
    """Return the files that cannot express the plan, each with the reasons."""
    if isinstance(plan, ServingLaunch):
        server = SERVERS.get(plan.engine, vllm)
        found = {server.FILE: server.obstacles(plan)}
    else:
        found = {target.FILE: target.obstacles(plan) for target in _TARGETS}
    return {name: list(dict.fromkeys(reasons)) for name, reasons in found.items() if reasons}


def _write(texts: Mapping[str, str], directory: Path, *, force: bool) -> list[Path]:
    paths = [directory / name for name in texts]
    _check(paths, directory, force=force)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, texts.values(), strict=True):
            path.write_text(text, encoding="utf-8")
            if path.suffix == ".sh":
                path.chmod(0o755)
    except OSError as error:
        raise RequestError(
            f"Cannot write {error.filename}: {error.strerror}.", hint="Name a folder that you can write to."
        ) from None
    return paths


def _check(paths: Sequence[Path], directory: Path, *, force: bool) -> None:
    if directory.exists() and not directory.is_dir():
        raise RequestError(f"{directory} is a file, not a folder.", hint="Name a folder for the files to launch with.")
    there = [path.name for path in paths if path.exists()]
    if there and not force:
        found = ", ".join(there)
        raise OutputExists(
            f"{directory} holds {found} already.", hint="Choose another folder, or pass --force to replace them."
        )
