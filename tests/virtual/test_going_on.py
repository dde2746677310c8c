"""A run that its card cannot hold goes on without the limit, unless the script deals with the error itself."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tonnage.virtual import going_on
from tonnage.virtual.going_on import GoingOn, Stopped
from virtual_runs import SCRIPTS, run_tonnage

GIB = 2**30


def run(tmp_path: Path, how: str, gpu: str = "4090", **options: Any) -> tuple[Any, dict[str, Any]]:
    answer = tmp_path / "answer.json"
    done = run_tonnage("run", "--gpu", gpu, "--json", str(answer), str(SCRIPTS / "runs_out.py"), how, **options)
    return done, json.loads(answer.read_text())


def test_it_goes_on_to_its_end_and_the_report_tells_where_it_died(tmp_path: Path) -> None:
    done, said = run(tmp_path, "")
    assert done.returncode == 1
    assert said["outcome"] == "oom" and said["fits"] is False and said["ooms_caught"] == 0
    assert said["oom"]["requested_bytes"] == 8 * GIB and said["oom"]["line"] == "runs_out.py:10"
    assert said["oom"]["allocated_bytes"] == said["peak_allocated_bytes"] == 16 * GIB
    assert said["total"]["peak_allocated_bytes"] == 32 * GIB < said["total"]["needed_bytes"]
    assert said["larger_card"] == "a100-40" or said["total"]["needed_bytes"] < 39 * GIB
    # The script's own traceback is there once, and so is its output.
    assert done.stderr.count("torch.OutOfMemoryError: CUDA out of memory.") == 1
    assert 'runs_out.py", line 10, in step' in done.stderr and "tonnage/virtual" not in done.stderr
    assert [word for word in done.stdout.split() if word.isdigit()][:4] == ["0", "1", "2", "3"]
    assert "free True" in done.stdout  # what it is told of the card stays true
    assert "in all" in done.stdout


@pytest.mark.parametrize("how", ["catches", "suppresses"])
def test_a_script_that_catches_the_error_sees_it(tmp_path: Path, how: str) -> None:
    done, said = run(tmp_path, how)
    assert done.returncode == 0, done.stderr
    assert said["outcome"] == "ok" and said["ooms_caught"] == 2 and said["total"] is None
    assert said["peak_allocated_bytes"] == 16 * GIB
    assert "OutOfMemoryError" not in done.stderr


def test_a_script_that_would_only_have_exited_goes_on(tmp_path: Path) -> None:
    done, said = run(tmp_path, "exits")
    assert done.returncode == 1
    assert said["outcome"] == "oom" and said["total"]["ending"] == "ended"


def test_what_fails_later_is_said(tmp_path: Path) -> None:
    done, said = run(tmp_path, "fails")
    assert done.returncode == 1 and said["outcome"] == "oom"
    assert said["total"]["ending"] == "ValueError: a mistake of its own"
    assert "ValueError: a mistake of its own" in done.stderr and "at least" in done.stdout


def test_nonsense_is_not_granted(tmp_path: Path) -> None:
    done, said = run(tmp_path, "huge")
    assert done.returncode == 1 and said["total"] is None
    assert said["oom"]["requested_bytes"] == 100 * 2**40
    assert "no card will ever hold that one tensor" in done.stdout


def test_expandable_segments_go_on_too(tmp_path: Path) -> None:
    import os

    settings = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    done, said = run(tmp_path, "", env=os.environ | settings)
    assert said["outcome"] == "oom", done.stderr
    assert said["total"]["peak_allocated_bytes"] == 32 * GIB


def test_without_a_limit_nothing_fails_and_every_card_has_an_answer(tmp_path: Path) -> None:
    done, said = run(tmp_path, "catches", gpu="all")
    assert done.returncode == 0, done.stderr
    assert "caught" not in done.stdout and said["outcome"] == "ok"
    fits = {row["gpu_key"]: row["fits"] for row in said["cards"]}
    assert not fits["rtx-4090"] and fits["a100-40"] and fits["h200"]
    assert said["needed_bytes"] > 32 * GIB


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> tuple[GoingOn, Clock, Any]:
    clock = Clock()
    monkeypatch.setattr(going_on, "time", clock)
    import threading

    device = SimpleNamespace(
        allocations=[], sequence=7, ooms=[None], attribution=SimpleNamespace(main_thread=threading.get_ident()),
        memory_stats=lambda: {"allocated_bytes.all.current": 5},
    )  # fmt: skip
    going = GoingOn(device, MemoryError)  # type: ignore[arg-type]
    going.since = 7
    return going, clock, device


def test_steps_that_repeat_end_it_after_a_while(endless: tuple[GoingOn, Clock, Any]) -> None:
    going, clock, device = endless
    for second in range(60):
        clock.now = second
        device.allocations.append(SimpleNamespace(block_bytes=512))
        try:
            going.check("step")
        except Stopped:
            break
    assert going.stopped_by == "repeats" and second == 21


def test_steps_that_differ_end_after_the_patience(endless: tuple[GoingOn, Clock, Any]) -> None:
    going, clock, device = endless
    for second in range(0, 3000, 10):
        clock.now = second
        device.allocations.append(SimpleNamespace(block_bytes=512 * second))
        try:
            going.check("step")
        except Stopped:
            break
    assert going.stopped_by == "patience" and second == 310


def test_what_has_not_run_out_is_never_stopped(endless: tuple[GoingOn, Clock, Any]) -> None:
    going, clock, _ = endless
    going.since = None
    clock.now = 10_000
    going.check("step")
    assert not going.stopped_by
