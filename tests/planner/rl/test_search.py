"""The fastest step of reinforcement learning that fits: what is chosen, what it is chosen over, what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tonnage.budget.serving.memory import ServingConfiguration, serving_budget
from tonnage.errors import BadLayout, TonnageError
from tonnage.hardware import find_cluster
from tonnage.models import find_model
from tonnage.planner.rl.rollout import rollout
from tonnage.planner.rl.search import RlFindings, RlRequest, plan_rl
from tonnage.planner.training.request import TrainingRequest
from tonnage.planner.training.search import HEADROOM

ROOT = Path(__file__).parents[3]
TRAINING = TrainingRequest(seq=1, tp=1, pp=1, cp=1)


def plan(
    model: str = "qwen2.5-1.5b", gpus: str = "h200", *, training: dict[str, Any] | None = None, **asked: Any
) -> RlFindings:
    request = RlRequest(training=replace(TRAINING, **(training or {})), **asked)
    return plan_rl(find_model(model), find_cluster(gpus), request)


def test_the_best_fits_in_every_phase_and_leaves_headroom() -> None:
    best = plan().best
    card = best.cluster.gpu.memory_bytes
    assert best.fits and all(phase.total_bytes <= (1 - HEADROOM) * card * 1.01 for phase in best.phases)
    assert best.step_s == pytest.approx(sum(phase.seconds for phase in best.phases))
    assert best.samples_per_s * best.step_s == pytest.approx(256)


def test_seconds_of_training_are_those_of_plan_train_with_logits_of_completions() -> None:
    from tonnage.planner.training.search import search

    found = plan(
        training={"micro_batch": 4, "checkpoint": "none", "loss": "full", "zero": 0, "framework": "torch"}
    ).best
    request = replace(
        TRAINING, seq=2560, global_batch=256, micro_batch=4, checkpoint="none", loss="full", logit_share=0.8
    )
    alone = search(find_model("qwen2.5-1.5b"), find_cluster("h200"), request).closest
    train = next(phase for phase in found.phases if phase.name == "train actor")
    assert train.seconds == pytest.approx(alone.step_s, rel=0.01)


def test_the_engine_gets_no_more_than_all_samples_need_at_once() -> None:
    few, many = plan(prompts=2).best, plan(prompts=64).best
    assert few.utilization < many.utilization <= 0.9
    assert few.rollout is not None and few.rollout.waves == 1 and few.rollout.batch == 16


def test_a_share_that_is_given_is_kept() -> None:
    assert plan(utilization=0.37).best.utilization == 0.37


def test_sleep_leaves_more_of_the_card_to_training() -> None:
    awake, asleep = plan("qwen2.5-3b", "h100", sleep=0).best, plan("qwen2.5-3b", "h100", sleep=2).best
    left = [next(phase for phase in one.phases if phase.name == "train actor") for one in (awake, asleep)]
    engine = [sum(held.size_bytes for held in phase.held if held.owner == "engine") for phase in left]
    assert engine[1] < engine[0] / 4
    assert asleep.step_s <= awake.step_s


def test_offloading_costs_the_time_that_the_link_takes() -> None:
    here, away = (plan(offload=frozenset(moved)).best for moved in ((), ("optimizer",)))
    moved = 8 * find_model("qwen2.5-1.5b").parameters
    link = here.cluster.host_link_bytes_per_s
    train = [next(phase.seconds for phase in one.phases if phase.name == "train actor") for one in (here, away)]
    assert 2 * moved / link < train[1] - train[0] < 3 * moved / link
    assert away.host_bytes == pytest.approx(moved, rel=0.01)


def test_cards_apart_run_beside_each_other_only_where_they_overlap() -> None:
    in_turn = plan(gpus="8xh100", rollout_gpus=4).best
    beside = plan(gpus="8xh100", rollout_gpus=4, overlap=True).best
    seconds = {phase.name: phase.seconds for phase in beside.phases}
    assert beside.step_s < in_turn.step_s
    rest = sum(value for name, value in seconds.items() if name not in ("rollout", "sync"))
    assert beside.step_s == pytest.approx(max(seconds["rollout"], rest) + seconds["sync"])


def test_more_than_a_card_has_is_said_with_flags_that_help() -> None:
    found = plan("qwen2.5-7b")
    assert not found.fits and found.best.missing_bytes > 0
    helpful = dict(found.remedies)
    assert "--precision bf16" in helpful and all(one.fits for one in helpful.values())
    assert plan("qwen2.5-7b", training={"precision": "bf16"}).fits


def test_beside_other_models_parameters_are_sharded() -> None:
    assert plan(gpus="4xh100", reference="copy").best.trainer.configuration.zero == 3


def test_the_clock_of_rollouts_is_within_a_fifth_of_a_measured_throughput() -> None:
    shape, cluster = find_model("qwen3-14b"), find_cluster("h200")
    measured = json.loads((ROOT / "benchmarks/results/serve-throughput-14b-bf16.json").read_text())
    # 256 sequences, inputs and outputs of 100 to 1024 tokens.
    asked = RlRequest(training=TRAINING, prompts=256, group=1, prompt=562, completion=523, engine="tonnage")
    engine = serving_budget(
        shape, ServingConfiguration(engine="tonnage", context=4096, max_seqs=256, utilization=0.9), cluster.gpu
    )
    made = rollout(shape, cluster, engine, asked, 0)
    assert made is not None and made.seconds == pytest.approx(measured["seconds"], rel=0.2)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"group": 0}, "--group 0"),
        ({"prompts": -3}, "--prompts -3"),
        ({"completion": 10**12}, "--completion"),
        ({"prompt": 1 << 24, "completion": 1 << 24}, "tokens together"),
        ({"model": "gpt2"}, "2,560 tokens together"),
        ({"iterations": 0}, "--iterations 0"),
        ({"group": 1}, "compares the completions"),
        ({"critic": find_model("qwen2.5-1.5b")}, "--critic"),
        ({"reference": "adapters-off"}, "no adapters are trained"),
        ({"utilization": 1.5}, "--utilization 1.5"),
        ({"utilization": float("nan")}, "--utilization nan"),
        ({"share_weights": True}, "vLLM keeps weights of its own"),
        ({"share_weights": True, "engine": "tonnage"}, "FP32"),
        ({"engine": "tonnage", "engine_tp": 2}, "one GPU"),
        ({"engine": "tonnage", "sleep": 2}, "keeps its weights"),
        ({"rollout_gpus": 1}, "one must train"),
        ({"rollout_gpus": -1}, "--rollout-gpus -1"),
        ({"overlap": True}, "--overlap"),
        ({"engine_tp": 3}, "--engine-tp 3"),
    ],
)
def test_what_cannot_be_is_refused_with_a_hint(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(TonnageError, match=words) as refused:
        plan(**asked)
    assert refused.value.hint


def test_hosts_stay_alike() -> None:
    with pytest.raises(BadLayout, match="hosts of different sizes"):
        plan(gpus="2x8xh100", rollout_gpus=4)
