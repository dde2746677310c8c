"""The scripts around vLLM: run by bash with stand-ins for Ray and vLLM, whose words are held to Ray's own options."""

import importlib.util
import json
import os
import subprocess
import sys
import types
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tonnage.hardware import find_cluster
from tonnage.models import find_model
from tonnage.planner.export import ServingLaunch, export_serving
from tonnage.planner.serving.search import ServingConfiguration, plan_serving
from vllm_flags import SERVED, parser

RAY = json.loads((Path(__file__).parent / "data" / "ray-2.60.0.json").read_text())
TWO_HOSTS = replace(SERVED, tp=8, pp=2, stage_layers=(41, 39))


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    """`ray` and `vllm` that print their words and variables; `ray status` finds nothing."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("ray", "vllm"):
        text = f'[ "{name} $1" = "ray status" ] && exit 1\nprintf "%s\\t" {name} "$@"; echo\n'
        text += 'echo "ip=$VLLM_HOST_IP ray=$RAY_ADDRESS cards=$CUDA_VISIBLE_DEVICES cut=$VLLM_PP_LAYER_PARTITION"\n'
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (folder / name).chmod(0o755)
    return folder


def export(launch: ServingLaunch, folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in export_serving(launch, folder)}


def ran(script: Path, stand_ins: Path, **environment: str) -> list[str]:
    known = {"PATH": f"{stand_ins}:{os.environ['PATH']}", **environment}
    done = subprocess.run(["bash", str(script)], env=known, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def ray_start(line: str) -> Namespace:
    """The words of `ray start`, as its own options take them."""
    made = ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for name, kind in RAY["start"].items():
        made.add_argument(
            name, **({"action": "store_true"} if kind == "switch" else {"type": int if kind == "int" else str})
        )
    words = line.rstrip("\t").split("\t")
    assert words[:2] == ["ray", "start"]
    return made.parse_args(words[2:])


def no_waiting(folder: Path) -> None:
    """`check.py` that finds everything, for tests of the scripts alone."""
    (folder / "check.py").write_text('import sys\nprint("10.0.0.7" if sys.argv[1] == "address" else "there")\n')


def test_which_files_a_plan_takes(tmp_path: Path) -> None:
    assert set(export(replace(SERVED, tp=1), tmp_path / "one")) == {"vllm.sh", "check.py", "README.txt"}
    assert set(export(SERVED, tmp_path / "host")) == {"vllm.sh", "check.py", "README.txt"}
    ray = {"start-head.sh", "start-worker.sh"}
    assert set(export(TWO_HOSTS, tmp_path / "hosts")) == {"vllm.sh", "check.py", "README.txt", *ray}
    copies = export(replace(SERVED, copies=4), tmp_path / "copies")
    assert set(copies) == {"vllm.sh", "check.py", "README.txt", "start-copies.sh"}


@pytest.mark.parametrize("launch", [SERVED, TWO_HOSTS, replace(TWO_HOSTS, copies=3), replace(SERVED, copies=4)])
def test_everything_that_is_written_can_be_read(launch: ServingLaunch, tmp_path: Path) -> None:
    for name, text in export(launch, tmp_path).items():
        if name.endswith(".sh"):
            subprocess.run(["bash", "-n", str(tmp_path / name)], check=True)
        elif name.endswith(".py"):
            compile(text, name, "exec")
        else:
            assert max(map(len, text.splitlines())) <= 80


def test_the_head_starts_ray_then_vllm(tmp_path: Path, stand_ins: Path) -> None:
    export(TWO_HOSTS, tmp_path / "plan")
    no_waiting(tmp_path / "plan")
    started, _, waited, served, variables = ran(tmp_path / "plan" / "start-head.sh", stand_ins, HEAD="10.0.0.7")
    found = ray_start(started)
    assert found.head and (found.port, found.num_gpus, found.node_ip_address) == (6379, 8, "10.0.0.7")
    assert waited == "there"
    flags = parser().parse_args(served.rstrip("\t").split("\t")[2:])
    assert (flags.tensor_parallel_size, flags.pipeline_parallel_size) == (8, 2)
    assert flags.distributed_executor_backend == "ray"
    assert variables == "ip=10.0.0.7 ray=10.0.0.7:6379 cards= cut=41,39"


def test_a_worker_joins_the_head_and_stays(tmp_path: Path, stand_ins: Path) -> None:
    export(TWO_HOSTS, tmp_path / "plan")
    no_waiting(tmp_path / "plan")
    waited, started, _ = ran(tmp_path / "plan" / "start-worker.sh", stand_ins, HEAD="10.0.0.1")
    found = ray_start(started)
    assert waited == "there" and found.block and not found.head
    assert (found.address, found.num_gpus, found.node_ip_address) == ("10.0.0.1:6379", 8, "10.0.0.7")


@pytest.mark.parametrize("script", ["start-head.sh", "start-worker.sh", "vllm.sh"])
def test_a_missing_head_is_asked_for(script: str, tmp_path: Path, stand_ins: Path) -> None:
    export(TWO_HOSTS, tmp_path / "plan")
    known = {"PATH": f"{stand_ins}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", str(tmp_path / "plan" / script)], env=known, capture_output=True, text=True)
    assert done.returncode != 0 and "set HEAD" in done.stderr


def test_every_copy_has_its_cards_and_its_port(tmp_path: Path, stand_ins: Path) -> None:
    export(replace(SERVED, tp=2, copies=8), tmp_path / "plan")
    for copy, cards in ((0, "0,1"), (3, "6,7")):
        served, variables = ran(tmp_path / "plan" / "vllm.sh", stand_ins, COPY=str(copy))
        assert parser().parse_args(served.rstrip("\t").split("\t")[2:]).port == 8000 + copy
        assert f"cards={cards} " in variables


def test_all_copies_start_and_end_together(tmp_path: Path, stand_ins: Path) -> None:
    export(replace(SERVED, copies=2), tmp_path / "plan")
    marks = tmp_path / "marks"
    marks.mkdir()
    (stand_ins / "vllm").write_text(
        f"#!/usr/bin/env bash\ntouch {marks}/$CUDA_VISIBLE_DEVICES\n"
        f"trap 'touch {marks}/ended; exit' TERM\nuntil [ -e {marks}/0,1,2,3 ] && [ -e {marks}/4,5,6,7 ]; do sleep 0.02; done\n"
        '[ "$CUDA_VISIBLE_DEVICES" = 0,1,2,3 ] && exit 3\nwhile true; do sleep 0.02; done\n'
    )
    known = {"PATH": f"{stand_ins}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", str(tmp_path / "plan" / "start-copies.sh")], env=known, timeout=60)
    assert done.returncode == 3, "that of the copy which ended"
    assert {"0,1,2,3", "4,5,6,7"} <= {path.name for path in marks.iterdir()}


class StandInRay(types.ModuleType):
    """A cluster of these hosts: addresses, and the GPUs that each gives."""

    def __init__(self, gpus: dict[str, int]) -> None:
        super().__init__("ray")
        self.gpus = gpus

    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> list[dict[str, Any]]:
        gone = {"NodeManagerAddress": "10.9.9.9", "Alive": False, "Resources": {}}
        return [
            {"NodeManagerAddress": a, "Alive": True, "Resources": {"GPU": float(n)}} for a, n in self.gpus.items()
        ] + [gone]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`check.py` of two hosts, as a module, with a head that answers."""
    export(TWO_HOSTS, tmp_path / "plan")
    spec = importlib.util.spec_from_file_location("exported_check", tmp_path / "plan" / "check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "deaf_head", list)
    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    monkeypatch.setenv("HEAD", "10.0.0.1")
    monkeypatch.delenv("HOSTS", raising=False)
    yield module


def test_all_hosts_are_there(check: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ray", StandInRay({"10.0.0.1": 8, "10.0.0.2": 8}))
    assert check.main(["cluster", "0"]) == 0
    assert "all is there" in capsys.readouterr().out


def test_who_is_missing_is_named(
    check: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", StandInRay({"10.0.0.1": 8}))
    assert check.main(["cluster", "0"]) == 1
    assert "1 of 2 hosts have joined (10.0.0.1)" in capsys.readouterr().out
    monkeypatch.setenv("HOSTS", "10.0.0.1 10.0.0.2")
    assert check.main(["cluster", "0"]) == 1
    assert "10.0.0.2 has not joined" in capsys.readouterr().out
    monkeypatch.setenv("HOSTS", "10.0.0.1 10.0.0.2 10.0.0.3")
    with pytest.raises(SystemExit, match="HOSTS names 3 hosts, the plan has 2"):
        check.main(["cluster", "0"])


def test_a_host_that_lacks_cards_is_named(check: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "ray", StandInRay({"10.0.0.1": 8, "10.0.0.2": 4}))
    assert check.main(["cluster", "0"]) == 1
    assert "10.0.0.2 gives Ray 4 GPUs, the plan has 8" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["nodes"], ["cluster", "soon"], ["cluster", "1", "2"], ["address", "1"]])
def test_other_words_get_the_usage(check: Any, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(words) == 2
    assert "python3 check.py cluster [SECONDS]" in capsys.readouterr().err


def test_a_silent_server_and_a_dead_head_end(tmp_path: Path) -> None:
    export(TWO_HOSTS, tmp_path)
    known = os.environ | {"HEAD": "127.0.0.1", "SERVER": "http://127.0.0.1:9"}
    for check, words in (("head", "Ray's head does not answer"), ("server", "vLLM does not answer")):
        command = [sys.executable, str(tmp_path / "check.py"), check, "0"]
        done = subprocess.run(command, env=known, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1 and words in done.stdout
    address = subprocess.check_output([sys.executable, str(tmp_path / "check.py"), "address"], env=known, text=True)
    assert address.strip() == "127.0.0.1"


@pytest.mark.parametrize(
    ("model", "gpus", "said"),
    [
        (
            "llama-3.1-405b",
            "2x8xh100",
            ["1 copy of 16 GPUs: tensor parallelism 8, pipeline parallelism 2", "start-head.sh"],
        ),
        (
            "deepseek-v3",
            "4x8xh100",
            ["2 copies of 16 GPUs", "Make 2 groups of 2 hosts", "Layers of the stages: 32, 29"],
        ),
        ("llama-3.1-8b", "h100", ["1 copy of 1 GPU", "bash vllm.sh"]),
    ],
)
def test_the_readme_has_the_numbers_of_the_plan(model: str, gpus: str, said: list[str], tmp_path: Path) -> None:
    plan = plan_serving(find_model(model), find_cluster(gpus), ServingConfiguration(users=64), model=model)
    readme = export(plan.launch, tmp_path)["README.txt"]
    assert all(words in readme for words in said)
    assert f"{plan.best.budget.kv.tokens:,} tokens" in readme and f"{plan.best.configuration.utilization:g} ×" in readme
