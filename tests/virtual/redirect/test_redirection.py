"""A virtual run leaves the user's files as they are, however its script writes, and the script sees what it wrote."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cuda_build import TONNAGE, needs_cuda_build
from exports import ENGINES
from forked_runs import run_forked
from tonnage.recording import read_recording
from tonnage.virtual.redirect import Redirection
from virtual.redirect import ways
from virtual.redirect.folders import contents
from virtual_runs import run_tonnage

WAYS = Path(ways.__file__)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A training folder, as in a user's home."""
    made = tmp_path / "training"
    made.mkdir()
    ways.prepare(made)
    return made


@pytest.mark.parametrize("name", [way.__name__ for way in ways.WITHOUT_TORCH])
def test_way_of_writing_leaves_files_unchanged(name: str, folder: Path) -> None:
    before = contents(folder)
    done = subprocess.run(
        [sys.executable, WAYS, "--without-torch", name], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert contents(folder) == before


def test_script_that_begins_again_finds_the_original_files(folder: Path) -> None:
    before = contents(folder)
    script = """
import os, shutil
from pathlib import Path
from tonnage.virtual.redirect import Redirection

with Redirection() as redirection:
    shutil.rmtree("checkpoints")
    Path("model.pt").write_bytes(b"first")
    redirection.empty()
    assert Path("latest/trainer_state.json").exists()
    assert Path("model.pt").read_bytes() == b"the real weights"
    Path("model.pt").write_bytes(b"second")
print(*(os.path.basename(file.path) for file in redirection.writes.files))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["model.pt"], done.stderr
    assert contents(folder) == before


@needs_cuda_build
@pytest.mark.parametrize("name", [way.__name__ for way in ways.WITH_TORCH])
def test_way_of_saving_a_training_leaves_files_unchanged(name: str, folder: Path, tmp_path: Path) -> None:
    before = contents(folder)
    figures = tmp_path / "answer.json"
    words = ["run", "--gpu", "h200", "--json", str(figures), str(WAYS), name]
    environment = dict(os.environ)
    if name == "deepspeed":
        if not (ENGINES / "deepspeed").exists():
            pytest.skip("DeepSpeed is not installed: make setup")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), str(ENGINES)]))
    done = run_forked(TONNAGE, words, timeout_s=120, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    assert contents(folder) == before
    writes = json.loads(figures.read_text())["writes"]
    assert writes["fate"] == "discarded"
    assert writes["written_count"] > 0


CHECKPOINT = """
import os, sys, time, torch
model = torch.nn.Linear(65536, 65536, bias=False, device="cuda")
began = time.process_time()
if sys.argv[1] == "safetensors":
    from safetensors.torch import save_file
    save_file(model.state_dict(), "model.pt")
elif sys.argv[1] == "host":
    torch.save({name: tensor.cpu() for name, tensor in model.state_dict().items()}, "model.pt")
else:
    torch.save(model.state_dict(), "model.pt")
status = os.stat("model.pt")
print(time.process_time() - began, status.st_size, status.st_blocks * 512)
"""


@needs_cuda_build
@pytest.mark.parametrize("way", ["torch", "host", "safetensors"])
def test_checkpoint_of_16_gib_costs_neither_disk_nor_time(way: str, folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "big.py"
    script.write_text(CHECKPOINT)
    done = run_forked(TONNAGE, ["run", "--gpu", "h200", str(script), way], timeout_s=120, cwd=folder)
    assert done.returncode == 0, done.stderr
    seconds, size, disk = done.stdout.splitlines()[0].split()
    assert int(size) >= 16 << 30
    assert int(disk) < 100_000_000
    assert float(seconds) < 2
    assert "1 file written, 16.00 GiB (model.pt): discarded; use --keep DIR to keep" in done.stdout


WRITES = """
from pathlib import Path
Path("runs").mkdir()
Path("runs/new.txt").write_text("new")
Path("model.pt").write_bytes(b"made up")
Path("notes.txt").unlink()
Path("log.csv").rename("log.old.csv")
"""


def run_writes(folder: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    (folder / "train.py").write_text(WRITES)
    return run_tonnage("run", "--gpu", "h200", *flags, "train.py", cwd=folder)


def test_report_names_what_was_written_and_deleted(folder: Path, tmp_path: Path) -> None:
    before = contents(folder)
    done = run_writes(folder, "--verbose", "-o", str(tmp_path / "run.tonnage"))
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())
    assert "3 files written, 26 B (log.old.csv, …), 2 deleted: discarded; use --keep DIR to keep them" in shown
    assert "changed model.pt" in shown
    assert "deleted notes.txt" in shown
    (folder / "train.py").unlink()
    after = contents(folder)
    assert after == before
    writes = read_recording(tmp_path / "run.tonnage").writes
    assert writes is not None
    assert (writes.written_count, writes.deleted_count, writes.fate) == (3, 2, "discarded")


def test_keep_moves_the_files_to_a_new_folder(folder: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    done = run_writes(folder, "--keep", str(kept))
    assert done.returncode == 0, done.stderr
    assert "3 files written" in done.stdout
    assert str(kept) in done.stdout.replace("\n    ", "")
    assert (kept / "model.pt").read_bytes() == b"made up"
    assert (kept / "runs/new.txt").read_text() == "new"
    assert (kept / "log.old.csv").read_bytes() == ways.ORIGINALS["log.csv"]
    assert (folder / "model.pt").read_bytes() == ways.ORIGINALS["model.pt"]
    refused = run_writes(folder, "--keep", str(kept))
    assert refused.returncode == 2
    assert "is not an empty folder" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_write_lets_the_script_write_in_place_and_warns(folder: Path) -> None:
    done = run_writes(folder, "--write")
    assert done.returncode == 0, done.stderr
    assert "WARNING: --write lets the script change and delete your files" in done.stderr
    assert (folder / "model.pt").read_bytes() == b"made up"
    assert not (folder / "notes.txt").exists()
    both = run_writes(folder, "--write", "--keep", "x")
    assert both.returncode == 2
    assert "Leave out --keep or --write" in both.stderr


TRAINING = """
import torch
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    model(torch.ones(2, 8, device="cuda")).mean().backward()
    optimizer.step()
    torch.save(model.state_dict(), "model.pt")
"""


def test_certify_leaves_files_unchanged(folder: Path) -> None:
    (folder / "train.py").write_text(TRAINING)
    before = contents(folder)
    done = run_tonnage("certify", "--gpu", "h200", "train.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert contents(folder) == before
    assert "1 file written" in done.stdout


RANKS = """
import os, torch, torch.distributed as dist
dist.init_process_group("nccl")
rank = dist.get_rank()
torch.save(torch.ones(4), f"rank-{rank}.pt")
dist.barrier()
assert os.path.exists("rank-0.pt")
dist.destroy_process_group()
"""


def test_ranks_of_a_cluster_share_what_they_write(folder: Path, tmp_path: Path) -> None:
    (folder / "train.py").write_text(RANKS)
    before = contents(folder)
    figures = tmp_path / "figures.json"
    done = run_tonnage("run", "--gpus", "4xh200", "--json", str(figures), "train.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert contents(folder) == before
    assert json.loads(figures.read_text())["writes"]["written_count"] > 0


IN_PYTHON = """
import tonnage
from pathlib import Path
with tonnage.virtual_gpu("h200"):
    Path("model.pt").write_text("made up")
    assert Path("model.pt").read_text() == "made up"
Path("mine.txt").write_text("after the block")
with tonnage.virtual_gpu("h200") as gpu:
    tonnage.write_recording("run.tonnage", gpu.recording)
with tonnage.virtual_gpu("h200", keep="kept"):
    Path("model.pt").write_text("made up")
with tonnage.virtual_gpu("h200", write=True):
    Path("in_place.txt").write_text("x")
"""


def test_virtual_gpu_discards_keeps_or_writes(folder: Path) -> None:
    (folder / "use.py").write_text(IN_PYTHON)
    done = subprocess.run([sys.executable, "use.py"], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "1 file written, 7 B (" in done.stderr
    assert "use virtual_gpu(..., keep=DIR) to keep them" in done.stderr
    assert (folder / "model.pt").read_bytes() == ways.ORIGINALS["model.pt"]
    assert (folder / "kept/model.pt").read_text() == "made up"
    assert (folder / "mine.txt").exists()
    assert (folder / "in_place.txt").exists()
    assert (folder / "run.tonnage").exists()  # a result, and no file of the script's


MARKED = """
import pytest, torch
from pathlib import Path

@pytest.mark.gpu_memory(limit="1 GiB")
def test_saves(tmp_path):
    Path("model.pt").write_text("made up")
    (tmp_path / "x").write_text("x")
    assert Path("model.pt").read_text() == "made up"

def test_later(tmp_path):
    (tmp_path / "x").write_text("x")
    assert Path("model.pt").read_text() == "the real weights"
"""


def test_marked_test_leaves_files_unchanged(folder: Path) -> None:
    (folder / "test_it.py").write_text(MARKED)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "model.pt").read_bytes() == ways.ORIGINALS["model.pt"]


def test_redirection_inside_another_is_part_of_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with Redirection() as outer:
        with Redirection() as inner:
            Path("model.pt").write_text("x")
        assert inner.writes is None
        assert Path("model.pt").read_text() == "x"
    assert outer.writes is not None
    assert [file.change for file in outer.writes.files] == ["changed"]
    assert (folder / "model.pt").read_bytes() == ways.ORIGINALS["model.pt"]


def test_named_folder_is_written_in_place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TONNAGE_WRITE_THROUGH", str(folder / "data"))
    with Redirection():
        Path("data/new.bin").write_bytes(b"x")
        Path("new.bin").write_bytes(b"x")
    assert (folder / "data/new.bin").exists()
    assert not (folder / "new.bin").exists()


def test_loggers_are_offline_while_a_script_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://tracking.example")
    with Redirection():
        assert os.environ["WANDB_MODE"] == "offline"
        assert os.environ["MLFLOW_TRACKING_URI"].startswith("sqlite:///")
    assert os.environ["MLFLOW_TRACKING_URI"] == "https://tracking.example"
    assert "WANDB_MODE" not in os.environ


MANY = """
import sys
from pathlib import Path
from concurrent.futures import ThreadPoolExecutor
def append(number):
    with open(f"data/part-{number % 2}.bin", "ab") as file:
        file.write(b"x")
with ThreadPoolExecutor(16) as pool:
    list(pool.map(append, range(64)))
assert Path("data/part-0.bin").stat().st_size == 256 * 64 + 32
assert Path("data/part-1.bin").stat().st_size == 4096 + 32
"""


def test_threads_that_change_one_file_share_its_copy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    before = contents(folder)
    for _ in range(5):
        with Redirection():
            exec(MANY, {})
        assert contents(folder) == before


def test_child_that_outlives_the_run_cannot_write(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    before = contents(folder)
    with Redirection():
        child = subprocess.Popen(
            ["/bin/sh", "-c", "read line; echo late > model.pt; /bin/sh -c 'echo later > notes.txt'"],
            stdin=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
    _, errors = child.communicate(b"go\n", timeout=20)
    assert b"model.pt" in errors
    assert b"notes.txt" in errors
    assert contents(folder) == before
