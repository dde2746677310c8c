"""Objectives beyond next tokens: memory against steps of the virtual GPU, weights and passes against arithmetic."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tonnage.budget.time.step import NO_GRAD, step_time
from tonnage.budget.training.configuration import Configuration
from tonnage.budget.training.memory import TrainingBudget, training_budget
from tonnage.budget.training.objectives import Objective, objective_names, objective_of
from tonnage.hardware import find_cluster, find_gpu
from tonnage.models import ModelShape, find_model, from_config

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
CASES: dict[str, dict[str, Any]] = json.loads((BENCHMARKS / "results/objectives.json").read_text())["cases"]
H200 = find_gpu("h200")


def model(name: str) -> ModelShape:
    return from_config(json.loads((BENCHMARKS / f"objectives/{name}.json").read_text()))


def planned(case: str) -> tuple[ModelShape, Configuration]:
    """A case of `benchmarks/objectives/run.py` as the planner sees it."""
    parser = argparse.ArgumentParser()
    for name in ("script", "objective", "config"):
        parser.add_argument(name)
    for name, default in (("batch", 1), ("seq", 512), ("lora", 0), ("negatives", 0), ("grad-cache", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--checkpoint", default="none")
    parser.add_argument("--precomputed", action="store_true")
    parser.add_argument("--teacher")
    words = parser.parse_args(case.split())
    objective = objective_of(words.objective)
    if objective.reference:
        how = "precomputed" if words.precomputed else "adapters-off" if words.lora else "copy"
        objective = replace(objective, how=how)
    teacher = model(words.teacher) if words.teacher else None
    sequences = objective.sequences + words.negatives
    objective = replace(objective, teacher=teacher, sequences=sequences, grad_cache=bool(words.grad_cache))
    configuration = Configuration(
        objective=objective,
        precision=words.precision,
        checkpoint=words.checkpoint,
        lora_rank=words.lora,
        seq=words.seq,
        micro_batch=words.grad_cache or words.batch * sequences,
        accumulate=words.batch * sequences // words.grad_cache if words.grad_cache else 1,
        optimizer_kernel="fused",
    )
    return objective.trained(model(words.config)), configuration


def budget_of(shape: ModelShape, **choices: Any) -> TrainingBudget:
    return training_budget(shape, Configuration(seq=1024, **choices), H200)


@pytest.mark.parametrize("case", CASES)
def test_memory_is_within_3_percent_of_the_virtual_gpu(case: str) -> None:
    budget = training_budget(*planned(case), H200)
    assert float(budget.peak_allocated_bytes) == pytest.approx(CASES[case]["peak_allocated_bytes"], rel=0.03)


def test_steps_take_about_as_long_as_on_the_virtual_gpu() -> None:
    h200 = find_cluster("h200")
    ratios = [float(step_time(*planned(case), h200).total_s) / CASES[case]["step_time_s"] for case in CASES]
    assert 0.9 < median(ratios) < 1.1
    assert 0.65 < min(ratios) < max(ratios) < 1.4


def test_every_objective_was_run_on_the_virtual_gpu() -> None:
    assert len(CASES) >= 10
    assert {case.split()[1] for case in CASES} == set(objective_names()) - {"next-token"}


def frozen_bytes(budget: TrainingBudget) -> float:
    return sum(float(term.size_bytes) for term in budget.terms_at(0) if term.name.startswith(("reference", "teacher")))


def test_a_reference_is_loaded_as_the_policy_is_and_shares_its_sharding() -> None:
    shape, dpo = model("llama"), objective_of("dpo", how="copy")
    whole = {"micro_batch": 2, "objective": dpo}
    assert frozen_bytes(budget_of(shape, **whole)) == 4 * shape.parameters
    assert frozen_bytes(budget_of(shape, **whole, precision="bf16")) == 2 * shape.parameters
    ranks = {"data": 8, "shard": 8}
    three = budget_of(shape, **whole, framework="deepspeed", zero=3, **ranks)
    two = budget_of(shape, **whole, framework="deepspeed", zero=2, **ranks)
    assert frozen_bytes(three) == pytest.approx(2 * shape.parameters / 8, rel=1e-6)
    assert frozen_bytes(two) == 2 * shape.parameters


@pytest.mark.parametrize("how", ["adapters-off", "precomputed"])
def test_no_reference_is_held_that_is_not_needed(how: str) -> None:
    shape = model("llama")
    rank = 16 if how == "adapters-off" else 0
    budget = budget_of(shape, micro_batch=2, objective=objective_of("dpo", how=how), lora_rank=rank)
    assert frozen_bytes(budget) == 0


def test_a_teacher_in_few_bits_takes_less() -> None:
    student, teacher = model("qwen3"), model("teacher")
    wide, narrow = (
        budget_of(student, objective=objective_of("distill", teacher=teacher, teacher_base=base))
        for base in ("16-bit", "nf4")
    )
    assert frozen_bytes(wide) == 2 * teacher.parameters
    blocks = sum(stack.parameters for stack in teacher.stacks)
    assert frozen_bytes(narrow) == pytest.approx(2 * (teacher.parameters - blocks) + 4.127 / 8 * blocks, rel=0.01)


def test_a_fsdp2_reference_is_gathered_in_one_piece() -> None:
    shape = find_model("llama-3.1-8b")
    budget = budget_of(
        shape, objective=objective_of("dpo", how="copy"), micro_batch=2, framework="fsdp2", zero=3, data=8, shard=8
    )
    gathered = [term for term in budget.terms_at(0) if term.name == "gathered parameters of the reference"]
    assert "of the reference" in budget.moment_at(0)
    assert [float(term.size_bytes) for term in gathered] == [2 * shape.parameters]


def time_of(objective: Objective, **choices: Any) -> tuple[float, float]:
    """Seconds of the forward passes with gradients and without."""
    configuration = Configuration(seq=2048, micro_batch=4, precision="bf16", objective=objective, **choices)
    parts = step_time(find_model("llama-3.2-1b"), configuration, find_cluster("h200")).parts
    return float(parts["forward"]), float(parts[NO_GRAD])


def test_a_reference_takes_a_forward_pass_and_kto_takes_three() -> None:
    forward, reference = time_of(objective_of("dpo", how="copy"))
    assert reference == pytest.approx(forward, rel=0.05)
    assert time_of(objective_of("kto", how="copy"))[1] == pytest.approx(3 * forward, rel=0.05)
    assert time_of(objective_of("dpo", how="precomputed"))[1] == 0
    assert time_of(objective_of("orpo"))[1] == 0


def test_a_teacher_takes_as_long_as_it_is_large() -> None:
    forward, taught = time_of(objective_of("distill", teacher=find_model("llama-3.1-8b")))
    assert 4 < taught / forward < 7  # 8.0 B over 1.2 B parameters, whose heads weigh more in the small one


def test_objectives_without_scores_have_no_head() -> None:
    shape = find_model("llama-3.1-8b")
    for name in ("reward", "classify", "contrastive"):
        trained = objective_of(name).trained(shape)
        assert not trained.logits
        assert shape.parameters - trained.parameters == pytest.approx(shape.head_parameters, rel=0.001)
    assert objective_of("dpo").trained(shape) is shape
