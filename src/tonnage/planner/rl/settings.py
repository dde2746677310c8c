"""The settings of TRL and verl that determine the memory of a reinforcement learning plan.

Names are those of TRL 1.x (`GRPOConfig`, `RLOOConfig`) and of verl's `main_ppo`. A trainer that cannot express the plan
is left out: TRL offloads nothing between phases and has no critic there; verl trains under FSDP.
"""

from tonnage.planner.rl.search import RlPlan

_ESTIMATORS = {"ppo": "gae", "grpo": "grpo", "dapo": "grpo", "rloo": "rloo", "reinforce++": "reinforce_plus_plus"}


def trl_settings(plan: RlPlan) -> dict[str, object]:
    """Return settings of `GRPOConfig` or `RLOOConfig`; empty if TRL cannot express the plan."""
    asked, cast, chosen = plan.request, plan.cast, plan.trainer.configuration
    plain = chosen.checkpoint in ("none", "full") and chosen.loss != "chunked" and not chosen.quantized_base
    if asked.algorithm not in ("grpo", "dapo", "rloo") or asked.engine != "vllm" or cast.offload or not plain:
        return {}
    words: dict[str, object] = {
        "per_device_train_batch_size": int(chosen.micro_batch),
        "gradient_accumulation_steps": int(chosen.accumulate),
        "num_generations": asked.group,
        "max_completion_length": asked.completion,
        "num_iterations": asked.iterations,
        "gradient_checkpointing": chosen.checkpoint == "full",
        "use_vllm": True,
        "vllm_mode": "server" if plan.rollout_gpus else "colocate",
    }
    if not plan.rollout_gpus:
        words["vllm_gpu_memory_utilization"] = plan.utilization
        words["vllm_enable_sleep_mode"] = bool(cast.sleep)
        words["vllm_tensor_parallel_size"] = plan.engine.configuration.tp
        words["vllm_max_model_length"] = asked.seq
    if cast.reference == "none":
        words["beta"] = 0.0
    if chosen.precision == "bf16":
        words["model_init_kwargs"] = {"dtype": "bfloat16"}
    return words | ({"use_liger_kernel": True} if chosen.liger else {})


def verl_settings(plan: RlPlan) -> dict[str, object]:
    """Return overrides of `verl.trainer.main_ppo`; empty if verl cannot express the plan."""
    asked, cast, chosen = plan.request, plan.cast, plan.trainer.configuration
    plain = chosen.checkpoint in ("none", "full") and not chosen.quantized_base
    if asked.engine != "vllm" or plan.rollout_gpus or not plain or (chosen.data > 1 and chosen.zero != 3):
        return {}
    actor, rollout, micro = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", int(chosen.micro_batch)
    words: dict[str, object] = {
        "algorithm.adv_estimator": _ESTIMATORS[asked.algorithm],
        "data.train_batch_size": asked.prompts,
        "data.max_prompt_length": asked.prompt,
        "data.max_response_length": asked.completion,
        f"{actor}.ppo_mini_batch_size": asked.prompts,
        f"{actor}.ppo_micro_batch_size_per_gpu": micro,
        f"{actor}.ppo_epochs": asked.iterations,
        f"{actor}.fsdp_config.param_offload": "weights" in cast.offload,
        f"{actor}.fsdp_config.optimizer_offload": "optimizer" in cast.offload,
        "actor_rollout_ref.model.enable_gradient_checkpointing": chosen.checkpoint == "full",
        f"{rollout}.name": "vllm",
        f"{rollout}.n": asked.group,
        f"{rollout}.gpu_memory_utilization": plan.utilization,
        f"{rollout}.tensor_model_parallel_size": plan.engine.configuration.tp,
        f"{rollout}.free_cache_engine": bool(cast.sleep),
        f"{rollout}.log_prob_micro_batch_size_per_gpu": micro,
        "trainer.n_gpus_per_node": plan.cluster.gpus_per_host,
        "trainer.nnodes": plan.cluster.hosts,
    }
    if cast.reference != "none":
        words["actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"] = micro
        words[f"{actor}.use_kl_loss"] = True
    if cast.critic is not None:
        words["critic.ppo_micro_batch_size_per_gpu"] = micro
    return words
