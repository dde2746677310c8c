"""A training of which known steps are replayed takes and drops the same blocks as one whose every step is run."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "lengths.py"
_BOTH = """
import contextlib, io, json, sys
from pathlib import Path
from tonnage.allocator import AllocatorSettings
from tonnage.certify.replay import live_through
from tonnage.certify.running import run_training
from tonnage.hardware import find_cuda_gpu
from tonnage.script.running import Program
gpu = find_cuda_gpu("h200")
with contextlib.redirect_stdout(io.StringIO()):
    done = run_training(Program.of_file(Path(sys.argv[1])), sys.argv[3:], gpu=gpu, replays=sys.argv[2] == "1")
lived = live_through(done.program, gpu.memory_bytes, AllocatorSettings())
print(json.dumps([done.ending.error, done.steps, done.replayed_parts, done.is_faithful, lived.unknown_frees,
                  lived.allocated_bytes, lived.reserved_bytes, [part.kind for part in done.program.parts]]))
"""


def trained(replays: bool, words: str) -> list[object]:
    import json

    command = [sys.executable, "-c", _BOTH, str(SCRIPT), str(int(replays)), *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("words", ["", "--accumulate 2 --precision fp16", "--leak"])
def test_replays_change_nothing(words: str) -> None:
    error, steps, none_replayed, *whole = trained(False, f"--steps 20 {words}")
    again, same_steps, replayed, *found = trained(True, f"--steps 20 {words}")
    assert not error and not again and none_replayed == 0
    assert same_steps == steps and replayed > 8
    assert found == whole and found[0] is True and found[1] == 0


def test_gradients_that_the_script_handles_itself_get_tensors() -> None:
    _, _, _, _, *whole = trained(False, "--steps 20 --by-hand")
    error, _, replayed, faithful, *found = trained(True, "--steps 20 --by-hand")
    assert not error and replayed and faithful and found == whole


def test_a_script_that_only_looks_at_gradients_is_noticed() -> None:
    _, _, replayed, faithful, *_ = trained(True, "--steps 24 --watch-gradients")
    assert replayed and not faithful
