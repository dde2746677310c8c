"""Command lines as people write them, read by the installed launchers themselves."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from exports import ENGINES
from tonnage.errors import BadLayout, RequestError, ScriptNotFound
from tonnage.hardware.cluster import find_cuda_cluster
from tonnage.script.launchers import LaunchCommand, read_launch

FSDP = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}
mixed_precision: bf16
num_machines: 1
num_processes: 4
machine_rank: 0
"""


def needs(package: str) -> None:
    """Skip without the package; a CUDA build of torch cannot be imported here to see."""
    if find_spec(package) is None:
        pytest.skip(f"needs {package}")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("pass\n")
    (tmp_path / "fsdp.yaml").write_text(FSDP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))  # no configuration of the user's own
    return tmp_path


def read(line: str) -> LaunchCommand:
    return read_launch(line.split(), gpus=8)


@pytest.mark.parametrize(
    "line", ["train.py --rows 8", "python train.py --rows 8", "python3 -u -X dev -W ignore train.py --rows 8"]
)
def test_a_program_of_one_process(line: str, folder: Path) -> None:
    launch = read(line)
    assert (launch.program.name, launch.arguments, launch.has_ranks) == ("train.py", ("--rows", "8"), False)
    assert launch.program.command == (str(folder / "train.py"),)


def test_a_module() -> None:
    for launch in (read("python -m json.tool --help"), read_launch(["json.tool", "--help"], is_module=True)):
        assert (launch.program.name, launch.program.kind, launch.arguments) == ("json.tool", "module", ("--help",))


@pytest.mark.parametrize(
    ("line", "hosts", "per_host", "arguments"),
    [
        ("torchrun --nproc-per-node 2 train.py --rows 8", 1, 2, ("--rows", "8")),
        ("torchrun --nnodes=1:2 --nproc_per_node gpu --rdzv-backend c10d train.py", 2, 8, ()),
        (
            "python -m torch.distributed.launch --nproc_per_node=2 train.py -v",
            1,
            2,
            ("--local-rank=${local_rank}", "-v"),
        ),
    ],
)
def test_torchrun(line: str, hosts: int, per_host: int, arguments: tuple[str, ...]) -> None:
    needs("torch")
    launch = read(line)
    assert (launch.hosts, launch.per_host, launch.arguments) == (hosts, per_host, arguments)
    assert launch.program.name == "train.py"
    assert launch.program.command[-1] == "train.py"


def test_accelerate_reads_its_file() -> None:
    needs("accelerate")
    launch = read("accelerate launch --config_file fsdp.yaml train.py --rows 8")
    assert (launch.hosts, launch.per_host, launch.arguments) == (1, 4, ("--rows", "8"))
    assert launch.environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert launch.environment["FSDP_VERSION"] == "2"


def test_accelerate_starts_one_process_for_each_gpu_or_just_one() -> None:
    needs("accelerate")
    assert read("accelerate launch train.py").per_host == 8
    launch = read("accelerate launch --num_processes 1 --mixed_precision bf16 train.py --rows 8")
    assert (launch.has_ranks, launch.arguments) == (False, ("--rows", "8"))
    assert launch.environment["ACCELERATE_MIXED_PRECISION"] == "bf16"


def test_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ENGINES), prepend=os.pathsep)
    launch = read("deepspeed --num_gpus 2 train.py --rows 8")
    assert (launch.hosts, launch.per_host) == (1, 2)
    assert launch.arguments == ("--local_rank=${local_rank}", "--rows", "8")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("python -c pass", "no file in this command"),
        ("python", "no file in this command"),
        ("python --version train.py", "python --version is not taken"),
        ("mpirun -np 2 train.py", "mpirun is not a launcher"),
        ("accelerate config", "starts no training"),
        ("absent.py", "no script at absent.py"),
    ],
)
def test_what_cannot_be_run_says_what_can(line: str, words: str) -> None:
    with pytest.raises(ScriptNotFound, match=words) as problem:
        read(line)
    assert "accelerate" in problem.value.hint


def test_a_launcher_s_own_complaint_is_its_own() -> None:
    needs("torch")
    with pytest.raises(RequestError, match="torchrun did not take its words"):
        read("torchrun --nonsense train.py")
    with pytest.raises(RequestError, match="no-python starts"):
        read("torchrun --no-python train.py")


def test_the_cards_are_as_many_as_the_processes() -> None:
    launch = LaunchCommand(read("train.py").program, hosts=2, per_host=4)
    assert launch.cluster("h200", None).gpus == 8
    part = launch.cluster("", find_cuda_cluster("4x8xh100"))
    assert (part.hosts, part.gpus_per_host, part.gpu.key) == (2, 4, "h100")
    with pytest.raises(BadLayout, match="2 × 4 processes"):
        launch.cluster("", find_cuda_cluster("2xh100"))
