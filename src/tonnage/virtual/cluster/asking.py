"""Run as `python -m tonnage.virtual.cluster.asking`: executes a launcher up to where it would start processes, and reports
these.

The launcher sees a host with the requested GPUs: PyTorch reports that many.
"""

import argparse
import json
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

_BEFORE = dict(os.environ)


def main() -> None:
    """Run a launcher; arguments: the answer's file, its package, its name, GPUs per host, its own arguments."""
    answer, package, launcher, gpus, *words = sys.argv[1:]
    sys.argv = [launcher, *words]
    try:
        for name in ("torch", package):
            if find_spec(name) is None:
                raise ModuleNotFoundError(name=name)
        from tonnage.virtual.driver import loading

        if loading.is_cuda_build(loading.torch_root()):  # it may be installed without CUDA's own libraries
            loading.load(loading.installed_cuda())
        import torch

        owner: Any
        for owner in (torch.cuda, torch.accelerator):
            owner.is_available = lambda *_, **__: True
            owner.device_count = lambda *_, **__: int(gpus)
        torch.cuda.is_bf16_supported = lambda *_, **__: True
        {"torch": _torchrun, "accelerate": _accelerate, "deepspeed": _deepspeed}[package](launcher, words, int(gpus))
        return
    except _Answer as found:
        values = found.values
    except ModuleNotFoundError as error:
        values = {"missing": error.name}
    except Exception as error:
        values = {"problem": f"{type(error).__name__}: {error}"}
    Path(answer).write_text(json.dumps(values))


class _Answer(BaseException):
    """Stops a launcher where it would start processes; its own `except Exception` does not catch this."""

    def __init__(self, **values: Any) -> None:
        super().__init__()
        changed = {name: value for name, value in os.environ.items() if _BEFORE.get(name) != value}
        self.values = {"environment": changed, **values}


def _torchrun(launcher: str, words: list[str], gpus: int) -> None:
    is_old = launcher == "torch.distributed.launch"
    own: Any = import_module(launcher if is_old else "torch.distributed.run")
    _stop_at_run(gpus)
    if is_old:
        own.run = sys.modules["torch.distributed.run"].run  # which it has imported by name
        own.launch(own.parse_args(words))
    else:
        own.main(words)


def _stop_at_run(gpus: int) -> None:
    """Replace torchrun's `run`, which torchrun and accelerate call with parsed arguments."""
    runner: Any = import_module("torch.distributed.run")

    def run(args: argparse.Namespace) -> NoReturn:
        processes, most_hosts = str(args.nproc_per_node), runner.parse_min_max_nnodes(str(args.nnodes))[1]
        if processes == "cpu":
            processes = str(os.cpu_count())
        local_rank = [] if runner.get_use_env(args) else ["--local-rank=${local_rank}"]
        started = _python_words(args.training_script, [*local_rank, *args.training_script_args], args)
        raise _Answer(words=started, hosts=most_hosts, per_host=int(processes) if processes.isdigit() else gpus)

    runner.run = run


def _python_words(script: str, arguments: list[str], args: argparse.Namespace) -> list[str]:
    if args.no_python:
        raise ValueError(f"--no-python starts {script}, and a virtual GPU is one of Python")
    return [*(["-m"] if args.module else []), script, *arguments]


def _accelerate(launcher: str, words: list[str], gpus: int) -> None:
    launch: Any = import_module("accelerate.commands.launch")
    _stop_at_run(gpus)

    def start(command: list[str], env: dict[str, str], **_: Any) -> NoReturn:
        """Answer for a single process, which gets no rank: its command begins with Python."""
        os.environ.update(env)
        if command[0] != sys.executable:
            raise ValueError(f"it would start {command[0]}, and a virtual GPU is one of Python")
        raise _Answer(words=command[1:], hosts=0, per_host=0)

    launch.subprocess = SimpleNamespace(Popen=start)
    launch.launch_command(launch.launch_command_parser().parse_args(words))


def _deepspeed(launcher: str, words: list[str], gpus: int) -> None:
    os.environ["DS_ACCELERATOR"] = "cuda"
    runner: Any = import_module("deepspeed.launcher.runner")
    os.environ.pop("DS_ACCELERATOR")
    parse, parsed = runner.parse_args, []

    def parse_args(args: list[str] | None = None) -> Any:
        # Do not contact other hosts.
        parsed.append(parse(["--no_ssh_check", "--master_addr", "127.0.0.1", *(args or words)]))
        return parsed[-1]

    def encode_world_info(hosts: dict[str, list[int]]) -> NoReturn:
        args = parsed[-1]
        local_rank = [] if args.no_local_rank else ["--local_rank=${local_rank}"]
        started = _python_words(args.user_script, [*local_rank, *args.user_args], args)
        counts = {len(slots) for slots in hosts.values()}
        if len(counts) != 1:
            raise ValueError("its hosts have different numbers of GPUs, and those of a virtual cluster are equal")
        raise _Answer(words=started, hosts=len(hosts), per_host=counts.pop())

    runner.parse_args, runner.encode_world_info = parse_args, encode_world_info
    runner.main(words)


if __name__ == "__main__":
    main()
