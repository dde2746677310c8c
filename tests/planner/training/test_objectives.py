"""What is asked beside an objective, what is refused, and how batches of pairs are searched."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tonnage.commands import plan_train
from tonnage.errors import BadLayout
from tonnage.hardware import find_cluster
from tonnage.models import find_model
from tonnage.planner.training.remedies import remedies
from tonnage.planner.training.request import NO_OFFLOAD, TrainingRequest, asked_objective, check
from tonnage.planner.training.search import search
from tonnage.planner.training.space import layouts

SMALL = find_model("llama-3.2-1b")
ONE, EIGHT = find_cluster("h200"), find_cluster("8xh100")


def request(
    name: str = "dpo", *, adapters: bool = False, with_it: dict[str, Any] | None = None, **asked: Any
) -> TrainingRequest:
    objective = asked_objective(name, adapters=adapters, **(with_it or {}))
    return TrainingRequest(**{"seq": 1024, "objective": objective, **asked})


def test_the_reference_is_a_copy_unless_adapters_are_trained() -> None:
    assert asked_objective("dpo", adapters=False).how == "copy"
    assert asked_objective("kto", adapters=True).how == "adapters-off"
    assert asked_objective("dpo", adapters=True, reference="copy").holds_frozen
    assert asked_objective("orpo", adapters=False).how is None


@pytest.mark.parametrize(
    ("name", "asked", "words"),
    [
        ("orpo", {"reference": "copy"}, "orpo has no reference"),
        ("dpo", {"reference": "adapters-off"}, "no adapters are trained"),
        ("distill", {}, "takes a teacher"),
        ("dpo", {"teacher": SMALL}, "dpo has no teacher"),
        ("dpo", {"teacher_base": "nf4"}, "--teacher-weights"),
        ("reward", {"grad_cache": True}, "--grad-cache"),
        ("reward", {"negatives": 3}, "--negatives"),
        ("contrastive", {"negatives": -1}, "--negatives -1"),
        ("contrastive", {"negatives": 10**9}, "--negatives"),
    ],
)
def test_what_does_not_go_with_an_objective_is_refused(name: str, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(BadLayout, match=words) as refused:
        asked_objective(name, adapters=False, **asked)
    assert refused.value.hint


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"tp": 2}, "--tp with --objective dpo"),
        ({"pp": 2}, "--pp with"),
        ({"framework": "megatron"}, "--framework megatron"),
    ],
)
def test_layouts_that_no_trainer_has_are_refused(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(BadLayout, match=words):
        check(request(**asked), SMALL, EIGHT)


def test_scores_are_asked_of_models_that_have_them() -> None:
    for encoder in ("bge-large", "bert-base"):
        with pytest.raises(BadLayout, match="takes a model that writes"):
            check(request(), find_model(encoder), ONE)
    with pytest.raises(BadLayout, match="no scores over a vocabulary"):
        check(request("reward", loss="chunked"), SMALL, ONE)


def test_a_teacher_has_the_words_of_its_student() -> None:
    with pytest.raises(BadLayout, match="cannot be compared"):
        check(request("distill", with_it={"teacher": find_model("qwen3-8b")}), SMALL, ONE)
    check(request("distill", with_it={"teacher": find_model("llama-3.1-8b")}), SMALL, ONE)


def test_micro_batches_count_pairs() -> None:
    asked = request(micro_batch=3, global_batch=48)
    rows = layouts(SMALL, EIGHT, asked)
    assert set(rows.micro_batch.tolist()) == {6}
    assert set((rows.micro_batch * rows.accumulate * rows.data).tolist()) == {96}
    assert set((rows.tp * rows.pp * rows.cp * rows.ep).tolist()) == {1}


def test_a_contrastive_batch_goes_through_in_one_pass_unless_it_is_cached() -> None:
    whole = layouts(SMALL, EIGHT, request("contrastive", loss="full", global_batch=1024))
    assert set(whole.accumulate.tolist()) == {1}
    assert set(whole.micro_batch.tolist()) == {2 * 1024 // 8}
    cached = layouts(SMALL, EIGHT, request("contrastive", with_it={"grad_cache": True}, loss="full", global_batch=1024))
    assert np.unique(cached.micro_batch).size > 1
    assert set((cached.micro_batch * cached.accumulate * cached.data).tolist()) == {2048}
    with pytest.raises(BadLayout, match="in one pass"):
        check(request("contrastive", loss="full", micro_batch=4, global_batch=64), SMALL, EIGHT)


def test_what_would_make_an_objective_fit_is_offered() -> None:
    batch = search(SMALL, ONE, request("contrastive", loss="full", global_batch=8192, offload=NO_OFFLOAD))
    assert "--grad-cache" in {remedy.flag for remedy in remedies(batch)}
    larger = find_model("llama-3.1-8b")
    held = search(larger, find_cluster("2xh100"), request(offload=NO_OFFLOAD, framework="deepspeed", zero=2))
    assert not held.fits
    assert "--reference precomputed" in {remedy.flag for remedy in remedies(held)}


def test_a_search_finds_a_plan_for_pairs() -> None:
    found = search(SMALL, ONE, request(global_batch=32))
    assert found.fits
    assert found.closest.samples == 32
    assert found.closest.tokens == 64 * 1024
    assert {one.family.configuration.framework for one in found.judged} <= {"torch", "fsdp2", "deepspeed"}


def test_the_figures_count_pairs_and_name_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    words = "llama-3.2-1b --gpus h200 --seq 1k --objective dpo --micro-batch 2 --global-batch 8".split()
    assert plan_train.command([*words, "--json", "-"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert best["config"]["objective"] == "dpo"
    assert (best["config"]["micro_batch"], best["config"]["accumulate"]) == (2, 4)
    assert best["frozen_bytes"] > 0
    assert best["samples_per_s"] == pytest.approx(8 / best["step_time_s"])
    assert plan_train.command([*words, "--explain"]) == 0
    out = capsys.readouterr().out
    assert "dpo: 8 pairs a step" in out
    assert "+ reference" in out
    assert "parameters: reference parameters" in out
    assert max(map(len, out.splitlines())) <= 80


def test_nothing_is_exported_that_would_train_on_next_tokens(tmp_path: Path) -> None:
    words = "llama-3.2-1b --gpus h200 --objective dpo --export".split()
    with pytest.raises(BadLayout, match="not by dpo"):
        plan_train.command([*words, str(tmp_path)])
