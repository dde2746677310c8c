"""Causes of the phases that people name: each on a script that has it, and on one that does not."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import loops
from loops import line_of, recorded
from support import MIB, Run
from tonnage.explain import Diagnosis, Finding, diagnose
from tonnage.explain.diagnosis import outlook_of
from tonnage.ledger import Category
from tonnage.recording import FailedRequest, Recording
from tonnage.recording.replay import demand

OF_PHASES = {
    "kept-predictions",
    "graph-in-evaluation",
    "training-in-evaluation",
    "generation-cache",
    "saving-on-gpu",
    "checkpoint-twice",
    "waiting-batches",
}


@cache
def of(script: Callable[..., Any], **options: Any) -> tuple[Recording, Diagnosis]:
    recording = recorded(script, **options)
    return recording, diagnose(recording)


def finding(diagnosis: Diagnosis, rule: str) -> Finding:
    return next(found for found in diagnosis.evidence if found.rule == rule)


@pytest.mark.parametrize("script", [loops.healthy, loops.evaluates, loops.keeps_graph])
def test_scripts_without_any_of_it_have_none(script: Callable[..., Any]) -> None:
    assert not OF_PHASES & {found.rule for found in of(script)[1].evidence}


@pytest.mark.parametrize(
    ("script", "mark", "kept_bytes"),
    [
        (loops.evaluates_and_keeps, "keeps the predictions", 24 * 4 * MIB),
        (loops.evaluates_and_joins, "joins the predictions", (24 + 23) * 4 * MIB),
    ],
)
def test_an_evaluation_that_keeps_all_predictions(script: Callable[..., Any], mark: str, kept_bytes: int) -> None:
    recording, diagnosis = of(script)
    assert diagnosis.cause == "evaluation"
    kept = finding(diagnosis, "kept-predictions")
    assert (kept.size_bytes, kept.lines[0].line) == (kept_bytes, line_of(mark))
    # without them the peak is that of training
    others = max(p.peak_allocated_bytes for p in recording.phases if p.name != "evaluation")
    assert recording.peak_allocated_bytes - kept.fixes[0].saves_bytes == others


def test_the_trainer_is_told_its_own_argument() -> None:
    run = Run()
    run.phase("evaluation")
    stack = ("transformers/trainer_pt_utils.py:87", "train.py:8")
    for _ in range(4):
        run.free(run.alloc(8 * MIB, Category.ACTIVATIONS, module="model", operator="embedding"))
        run.alloc(64 * MIB, Category.ACTIVATIONS, stack=stack)
    kept = finding(diagnose(run.recording), "kept-predictions")
    assert "eval_accumulation_steps" in kept.fixes[0].how


def test_what_one_batch_makes_in_a_loop_is_not_kept_of_all() -> None:
    run = Run()
    run.phase("evaluation")
    for _ in range(4):
        run.free(run.alloc(8 * MIB, Category.ACTIVATIONS, module="model", operator="embedding"))
        heads = [
            run.alloc(64 * MIB, Category.ACTIVATIONS, module="model", operator="mm", line="a.py:3") for _ in range(4)
        ]
        run.free(*heads)
    assert "kept-predictions" not in {found.rule for found in diagnose(run.recording).evidence}


def test_an_evaluation_without_no_grad() -> None:
    recording, diagnosis = of(loops.evaluates_with_gradients)
    assert diagnosis.cause == "evaluation"
    assert "no_grad" in diagnosis.sentence
    promised = recording.peak_allocated_bytes - diagnosis.fixes[0].saves_bytes
    assert recorded(loops.evaluates_with_gradients, no_grad=True).peak_allocated_bytes == pytest.approx(
        promised, rel=0.1
    )


def test_gradients_that_are_held_while_it_evaluates() -> None:
    recording, diagnosis = of(loops.evaluates_beside_gradients)
    held = finding(diagnosis, "training-in-evaluation")
    gradients = 8 * (2048 * 2048 + 2048) * 4
    assert held.size_bytes == held.fixes[0].saves_bytes == gradients
    assert "zero_grad(set_to_none=True)" in held.fixes[0].how
    assert diagnosis.cause == "evaluation"
    assert recording.fits


def test_copies_that_saving_makes(tmp_path: Path) -> None:
    diagnosis = of(loops.saves_copies, folder=tmp_path)[1]
    saving = finding(diagnosis, "saving-on-gpu")
    assert diagnosis.cause == "saving"
    assert (saving.size_bytes, saving.lines[0].line) == (8 * (2048 * 2048 + 2048) * 8, line_of("saves copies"))


def test_a_checkpoint_that_is_loaded_to_the_gpu_is_there_twice(tmp_path: Path) -> None:
    recording, diagnosis = of(loops.resumes, folder=tmp_path, where="cuda")
    twice = finding(diagnosis, "checkpoint-twice")
    assert diagnosis.cause == "loading"
    assert (twice.size_bytes, twice.lines[0].line) == (4 * (2048 * 2048 + 2048) * 4, line_of("loads the checkpoint"))
    through_host, healthy = of(loops.resumes, folder=tmp_path, where="cpu")
    assert healthy.cause == "none"
    saved = recording.peak_allocated_bytes - through_host.peak_allocated_bytes
    assert twice.fixes[0].saves_bytes == pytest.approx(saved, rel=0.02)


def test_batches_that_wait() -> None:
    recording, diagnosis = of(loops.fetches_ahead)
    waiting = finding(diagnosis, "waiting-batches")
    assert diagnosis.cause == "data"
    assert waiting.lines[0].line == line_of("fetches ahead")
    one_at_a_time = recorded(loops.fetches_ahead, ahead=1)
    saved = recording.peak_allocated_bytes - one_at_a_time.peak_allocated_bytes
    assert waiting.fixes[0].saves_bytes == pytest.approx(saved, rel=0.05)


def test_the_cache_of_generation_grows_with_its_tokens() -> None:
    recording, diagnosis = of(loops.generates)
    cache = finding(diagnosis, "generation-cache")
    assert diagnosis.cause == "none"  # it ends by itself
    assert "max_new_tokens" in cache.sentence
    assert any("max_new_tokens" in line for line in outlook_of(recording).lines)
    assert "unbounded-cache" not in {found.rule for found in diagnosis.evidence}


def test_a_death_in_evaluation_is_of_what_evaluation_keeps() -> None:
    recording = recorded(loops.evaluates_and_keeps)
    peak = recording.timeline.peak_sequence
    last = next(a for a in recording.allocations if a.born == peak)
    recording.oom = FailedRequest(
        line=last.line, requested_bytes=last.requested_bytes, free_bytes=last.requested_bytes - 32 * MIB,
        allocated_bytes=recording.peak_allocated_bytes, reserved_bytes=recording.peak_reserved_bytes,
        phase="evaluation", step=last.step, stack=last.stack,
    )  # fmt: skip
    recording.header.outcome = "oom"
    assert demand(recording).allocations[-1].stack == last.stack
    assert diagnose(recording).cause == "evaluation"
