import os
import sys

import pynvml
import pytest

from nvml_fake import GIB, FakeCard, FakeNvml
from tonnage.errors import MissingPart, TonnageError
from tonnage.hardware.nvml import open_nvml

GONE = 2**22 + 7  # no process has it: Linux's largest is 2**22


def test_what_the_driver_keeps_is_not_what_is_used() -> None:
    with open_nvml(FakeNvml(FakeCard(used_bytes=90 * GIB))) as reader:
        (gpu,) = reader.sample()
    assert (gpu.used_bytes, gpu.reserved_bytes, gpu.total_bytes) == (90 * GIB, GIB // 2, 140 * GIB)
    assert gpu.free_bytes == 140 * GIB - 90 * GIB - GIB // 2


def test_an_old_driver_counts_its_own_share_as_used() -> None:
    with open_nvml(FakeNvml(FakeCard(used_bytes=90 * GIB), driver_version=470)) as reader:
        (gpu,) = reader.sample()
    assert (gpu.used_bytes, gpu.reserved_bytes) == (90 * GIB + GIB // 2, 0)
    assert gpu.free_bytes == 140 * GIB - 90 * GIB - GIB // 2


def test_processes_are_largest_first_and_counted_once() -> None:
    card = FakeCard(used_bytes=12 * GIB, compute={GONE: GIB, GONE + 1: 8 * GIB}, graphics={GONE: GIB})
    with open_nvml(FakeNvml(card, names={GONE: "bin/desktop", GONE + 1: "bin/python"})) as reader:
        (gpu,) = reader.sample()
    assert [(p.pid, p.name, p.used_bytes) for p in gpu.processes] == [
        (GONE + 1, "python", 8 * GIB),
        (GONE, "desktop", GIB),
    ]
    assert gpu.unseen_bytes == 3 * GIB


def test_what_the_driver_does_not_tell_is_unknown_not_zero() -> None:
    with open_nvml(FakeNvml(FakeCard(busy_percent=None, used_bytes=GIB, compute={GONE: None}))) as reader:
        (gpu,) = reader.sample()
    assert gpu.busy_percent is None
    assert (gpu.processes[0].used_bytes, gpu.processes[0].name) == (None, "?")
    assert gpu.unseen_bytes == GIB


def test_a_script_is_named_by_its_file() -> None:
    with open_nvml(FakeNvml(FakeCard(compute={os.getpid(): GIB}))) as reader:
        (gpu,) = reader.sample()
    assert "python" in gpu.processes[0].name or "pytest" in gpu.processes[0].name


def test_it_is_closed_again() -> None:
    nvml = FakeNvml(FakeCard())
    with open_nvml(nvml) as reader:
        reader.sample()
    assert nvml.open == 0


def test_no_gpu_is_said_in_words() -> None:
    nvml = FakeNvml()
    with pytest.raises(MissingPart, match="finds no GPU"), open_nvml(nvml):
        pass
    assert nvml.open == 0


def test_a_gpu_that_is_lost_is_said_in_words() -> None:
    nvml = FakeNvml(FakeCard())
    with open_nvml(nvml) as reader:
        nvml.lost = True
        with pytest.raises(TonnageError, match="lost") as failure:
            reader.sample()
    assert "nvidia-smi" in failure.value.hint


def test_no_driver_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", no_library)
    with pytest.raises(MissingPart, match="no NVIDIA driver") as failure, open_nvml():
        pass
    assert "--gpus" in failure.value.hint


def test_a_missing_library_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(MissingPart, match="nvidia-ml-py") as failure, open_nvml():
        pass
    assert "tonnage[nvml]" in failure.value.hint
