"""Command lines as people write them, on virtual GPUs."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tonnage.recording import read_recording
from virtual_runs import SCRIPTS, run_tonnage

NOTEBOOK = Path(__file__).parents[1] / "script" / "programs" / "train.ipynb"


def needs(package: str) -> None:
    """Skip without the package; a CUDA build of torch cannot be imported here to see."""
    if find_spec(package) is None:
        pytest.skip(f"needs {package}")


def test_a_notebook_is_told_by_cell_and_line(tmp_path: Path) -> None:
    needs("IPython")
    answer = tmp_path / "answer.json"
    done = run_tonnage("run", "--gpu", "h200", "--json", str(answer), str(NOTEBOOK))
    assert done.returncode == 0, done.stderr
    said = json.loads(answer.read_text())
    assert said["peak"]["line"] == "train.ipynb cell 3:3"
    assert "hidden.square()" in done.stdout
    assert "!pip install einops is left out" in done.stderr


def test_torchrun_as_it_is(tmp_path: Path) -> None:
    script = tmp_path / "ddp.py"
    script.write_text(
        "import os, sys, torch\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('nccl')\n"
        "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(512, 512).cuda())\n"
        "model(torch.randn(64, 512, device='cuda')).sum().backward()\n"
        "print(dist.get_world_size(), sys.argv[1:])\n"
    )
    done = run_tonnage("run", "--gpu", "h200", "--", "torchrun", "--nproc-per-node", "2", str(script), "--lr", "1")
    assert done.returncode == 0, done.stderr
    assert "2 ['--lr', '1']" in done.stdout
    assert "2 × h200 in 1 host" in done.stdout


def test_accelerate_launch_as_it_is(tmp_path: Path) -> None:
    needs("accelerate")
    config = tmp_path / "accelerate.yaml"
    config.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: bf16\n"
        "num_machines: 1\nnum_processes: 2\nmachine_rank: 0\ngpu_ids: all\n"
    )
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nfrom accelerate import Accelerator\n"
        "one = Accelerator()\n"
        "model = torch.nn.Linear(512, 512)\n"
        "model, optimizer = one.prepare(model, torch.optim.AdamW(model.parameters()))\n"
        "one.backward(model(torch.randn(64, 512, device=one.device)).sum())\n"
        "optimizer.step()\n"
        "print(one.num_processes, one.mixed_precision, one.distributed_type.value)\n"
    )
    done = run_tonnage("run", "--gpu", "h200", "accelerate", "launch", "--config_file", str(config), str(script))
    assert done.returncode == 0, done.stderr
    assert "2 bf16 MULTI_GPU" in done.stdout


def test_explain_finds_the_script_from_another_folder_or_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, script = tmp_path / "run.tonnage", tmp_path / "raises.py"
    script.write_text((SCRIPTS / "raises.py").read_text())
    monkeypatch.chdir(tmp_path)
    run_tonnage("run", "--gpu", "h200", "-o", "run.tonnage", "raises.py")
    header = read_recording(kept).header
    assert (header.script, header.folder, header.program) == (str(script), str(tmp_path), "raises.py")
    monkeypatch.chdir("/")
    assert "no script" not in run_tonnage("explain", str(kept)).stderr
    script.unlink()
    assert f"there is no script at {script} any more" in run_tonnage("explain", str(kept)).stderr
