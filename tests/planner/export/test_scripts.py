"""torchrun.sh, environment.sh and launch.sh: run by bash with stand-ins for the launchers, whose words are then parsed."""

import os
import subprocess
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from exports import deepspeed, exported, fsdp2, plan


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    """Programs that print their name, their words and the allocator's settings, one a line."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("torchrun", "accelerate"):
        program = folder / name
        program.write_text(
            f'#!/usr/bin/env bash\nprintf "%s\\n" {name} "$@" "$PYTORCH_ALLOC_CONF" "${{OMP_NUM_THREADS:-}}"\n'
        )
        program.chmod(0o755)
    (tmp_path / "mine.py").touch()
    return folder


def launched(launch: Any, folder: Path, stand_ins: Path, *words: str, **environment: str) -> list[str]:
    exported(launch, folder)
    known = {"PATH": f"{stand_ins}:{os.environ['PATH']}", **environment}
    script = ["bash", str(folder / "launch.sh"), *words]
    done = subprocess.run(script, env=known, cwd=stand_ins.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


def torchrun(lines: list[str]) -> Namespace:
    assert lines[0] == "torchrun"
    return get_args_parser().parse_args(lines[1:-2])


def test_one_host(tmp_path: Path, stand_ins: Path) -> None:
    lines = launched(fsdp2(), tmp_path / "plan", stand_ins, "mine.py")
    found = torchrun(lines)
    assert found.standalone and found.nproc_per_node == "8"
    assert (found.training_script, found.training_script_args) == ("train.py", [str(tmp_path / "mine.py")])
    assert lines[-2:] == ["expandable_segments:True", ""]


def test_many_hosts_meet(tmp_path: Path, stand_ins: Path) -> None:
    found = torchrun(launched(deepspeed(gpus="4x8xh100"), tmp_path / "plan", stand_ins, "mine.py", HEAD="10.0.0.1"))
    assert (found.nnodes, found.nproc_per_node) == ("4", "8")
    assert (found.rdzv_backend, found.rdzv_endpoint) == ("c10d", "10.0.0.1:29500")


def test_torchtitan_is_started_as_a_module(tmp_path: Path, stand_ins: Path) -> None:
    found = torchrun(launched(fsdp2(tp=2), tmp_path / "plan", stand_ins, "--training.steps", "10"))
    assert found.module and found.training_script == "torchtitan.train"
    assert found.training_script_args == ["--job.config_file", "torchtitan.toml", "--training.steps", "10"]


def test_accelerate_starts_a_script_of_the_user_s(tmp_path: Path, stand_ins: Path) -> None:
    launch = fsdp2(model="gpt2", gpus="2x8xh100", shard=8)
    lines = launched(launch, tmp_path / "plan", stand_ins, "mine.py", "--x", HEAD="10.0.0.1", RANK="1")
    machines = ["--machine_rank", "1", "--main_process_ip", "10.0.0.1", "--main_process_port", "29500"]
    words = ["accelerate", "launch", "--config_file", "accelerate_fsdp2.yaml", *machines]
    assert lines[:-2] == [*words, str(tmp_path / "mine.py"), "--x"]


def test_torchrun_is_what_remains(tmp_path: Path, stand_ins: Path) -> None:
    found = torchrun(launched(plan(model="gpt2", tp=8), tmp_path / "plan", stand_ins, "mine.py"))
    assert found.training_script == str(tmp_path / "mine.py")


def test_an_optimizer_on_the_host_gets_its_threads(tmp_path: Path, stand_ins: Path) -> None:
    lines = launched(deepspeed(optimizer_place="host", gpus="1xh200"), tmp_path / "plan", stand_ins, "mine.py")
    assert int(lines[-1]) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("launch", "missing"), [(deepspeed(gpus="2x8xh100"), "HEAD"), (fsdp2(), "tokens")])
def test_what_is_missing_is_asked_for(launch: Any, missing: str, tmp_path: Path, stand_ins: Path) -> None:
    exported(launch, tmp_path / "plan")
    words = ["mine.py"] if missing == "HEAD" else []
    script = ["bash", str(tmp_path / "plan" / "launch.sh"), *words]
    environment = {"PATH": f"{stand_ins}:{os.environ['PATH']}"}
    done = subprocess.run(script, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0 and missing in done.stderr


def test_tf32_is_set_where_planned(tmp_path: Path) -> None:
    assert "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1" in exported(plan(precision="tf32"), tmp_path / "a")["environment.sh"]
    assert "TF32" not in exported(plan(), tmp_path / "b")["environment.sh"]
