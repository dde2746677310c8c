"""Libraries that people train with on many GPUs, each in a small script that torchrun would start."""

import json
import os
from pathlib import Path

import pytest

from exports import ENGINES
from virtual_runs import run_tonnage

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.mark.parametrize(
    ("script", "words", "printed"),
    [
        pytest.param("accelerated.py", ["ddp"], "losses of 2 ranks", marks=pytest.mark.slow),  # Trainer does the same
        ("accelerated.py", ["fsdp2"], "losses of 2 ranks"),
        ("trainer.py", ["FOLDER"], "world 2"),
        ("lightning_fsdp.py", [], "world 2"),
        pytest.param("deepspeed_stages.py", [], "stage 3 peak",
                     marks=pytest.mark.skipif(not (ENGINES / "deepspeed").exists(), reason="DeepSpeed is not here")),
    ],
)  # fmt: skip
def test_a_library_runs_on_a_virtual_cluster(script: str, words: list[str], printed: str, tmp_path: Path) -> None:
    answer, checkpoints = tmp_path / "answer.json", tmp_path / "checkpoints"
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ENGINES)]))
    given = [str(checkpoints) if word == "FOLDER" else word for word in words]
    options = ["--gpus", "2xh200", "--json", str(answer)]
    done = run_tonnage("run", *options, str(SCRIPTS / script), *given, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-3000:]
    assert printed in done.stdout
    said = json.loads(answer.read_text())
    assert sum(rank["ranks_alike"] for rank in said["ranks"]) == 2
    assert all(rank["ledger"]["optimizer_states"] > 0 for rank in said["ranks"])
    saved = [file["path"] for file in said["writes"]["files"] if file["path"].startswith(str(checkpoints))]
    assert ("FOLDER" in words) == bool(saved)
    assert not checkpoints.exists()
