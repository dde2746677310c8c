"""Steps captured under a CUDA build of torch, held against what an H200 ran."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from cuda_build import ROOT, needs_cuda_build, run
from tonnage.clock.captured import CapturedStep
from tonnage.recording import read_recording

pytestmark = needs_cuda_build
TRAIN = ROOT / "benchmarks" / "steps" / "train.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_captured", ROOT / "tools" / "compare_captured.py")
    assert spec and spec.loader
    module = sys.modules["compare_captured"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def captured(training: str, folder: Path) -> CapturedStep:
    done = run("--gpu", "h200", "-o", "run.tonnage", TRAIN, training, "--steps", "3", folder=folder)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "cupti" not in done.stdout + done.stderr  # the profiler begins without a word
    step = read_recording(folder / "run.tonnage").captured
    assert step is not None
    return step


@pytest.mark.truth
def test_every_operator_that_an_h200_ran_is_captured_as_often(tmp_path: Path, tool: ModuleType) -> None:
    training = "bert-base-amp-8x128"
    assert len(tool.measured_calls(training)) > 50
    assert list(tool.differences(training, captured(training, tmp_path))) == []


def test_kernels_of_a_compiled_model_have_names_and_shapes(tmp_path: Path) -> None:
    step = captured("mlp-fp32-64-compiled", tmp_path)
    kernels = {call.name: call for call in step.calls if call.kind == "kernel"}
    joined = kernels["triton_poi_fused_addmm_relu_0"]
    assert joined.shapes[:2] == ((64, 256), (256,))
    assert joined.types[:2] == ("float", "float")
    # The last of eight layers has a loss behind it.
    assert [moment.call for moment in step.moments()].count(joined) == 7
    assert not any(device == "meta" for call in step.calls for device in call.devices)  # nothing of the compilation


def test_a_step_with_transforms_needs_no_more_memory_where_it_is_captured(tmp_path: Path) -> None:
    script = Path(__file__).parent / "scripts" / "masks.py"
    done = run("--gpu", "h200", "-o", "run.tonnage", script, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "race" not in done.stderr and "oggling" not in done.stderr
    after_first = done.stdout.split()[1:5]
    assert len(set(after_first)) == 1, after_first
    step = read_recording(tmp_path / "run.tonnage").captured
    assert step is not None
    assert any(call.name == "bitwise_or" and call.shapes[0] == (2048, 2048) for call in step.calls)
