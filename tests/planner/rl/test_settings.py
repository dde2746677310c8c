"""A plan in the words of TRL and verl, where they can say it."""

from dataclasses import replace

from tonnage.hardware import find_cluster
from tonnage.models import find_model
from tonnage.planner.rl.search import RlPlan, RlRequest, plan_rl
from tonnage.planner.rl.settings import trl_settings, verl_settings
from tonnage.planner.training.request import TrainingRequest


def plan() -> RlPlan:
    training = TrainingRequest(seq=1, tp=1, pp=1, cp=1, precision="bf16", checkpoint="full", loss="full", micro_batch=4)
    request = RlRequest(training=training, prompts=8, completion=512, offload=frozenset(), sleep=2, utilization=0.3)
    return plan_rl(find_model("qwen2.5-0.5b"), find_cluster("h100"), request).best


def test_what_was_planned_is_what_is_written() -> None:
    best = plan()
    trl, verl = trl_settings(best), verl_settings(best)
    assert trl["vllm_gpu_memory_utilization"] == verl["actor_rollout_ref.rollout.gpu_memory_utilization"] == 0.3
    assert trl["vllm_enable_sleep_mode"] is verl["actor_rollout_ref.rollout.free_cache_engine"] is True
    # One generation of all samples is one step of the optimizer.
    assert trl["per_device_train_batch_size"] * trl["gradient_accumulation_steps"] == 64  # type: ignore[operator]
    assert verl["actor_rollout_ref.rollout.n"] == trl["num_generations"] == 8
    assert trl["model_init_kwargs"] == {"dtype": "bfloat16"} and trl["beta"] == 0.0


def test_who_cannot_say_it_says_nothing() -> None:
    best = plan()
    assert not trl_settings(replace(best, cast=replace(best.cast, offload=frozenset({"optimizer"}))))
    assert not trl_settings(replace(best, request=replace(best.request, algorithm="ppo")))
    selective = replace(best.trainer, configuration=replace(best.trainer.configuration, checkpoint="selective"))
    assert not trl_settings(replace(best, trainer=selective)) and not verl_settings(replace(best, trainer=selective))
    assert not verl_settings(replace(best, rollout_gpus=4))
