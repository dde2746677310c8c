"""Questions about reinforcement learning: docs/questions/reinforcement-learning.md."""

from typing import Any

import pytest

from questions.asking import answer
from tonnage.units import GIB


def phase(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in found["best"]["timeline"] if one["name"] == name)


def held(one: dict[str, Any], owner: str, category: str) -> int:
    return sum(term["size_bytes"] for term in one["held"] if (term["owner"], term["category"]) == (owner, category))


# Q: Can I run GRPO on a 7B model on one H200, training all of it?
def test_grpo_on_a_7b_model_on_one_h200() -> None:
    full = answer("tonnage plan rl qwen2.5-7b --gpus h200 --precision bf16")
    assert full["status"] == 0
    # Weights, gradients and two states of Adam, of two bytes each.
    train = phase(full, "train actor")
    states = sum(held(train, "actor", name) for name in ("parameters", "gradients", "optimizer_states"))
    assert states == pytest.approx(8 * 7.615e9, rel=0.01)
    mixed = answer("tonnage plan rl qwen2.5-7b --gpus h200")
    # Sixteen bytes of a weight are 113.5 GiB of 139.8, before copies in 16 bits and what the allocator cannot use.
    assert mixed["status"] == 1 and mixed["best"]["missing_bytes"] < 2 * GIB
    assert "--precision bf16" in [remedy["flag"] for remedy in mixed["remedies"]]


# Q: What gpu_memory_utilization should I give vLLM in TRL's colocate mode?
def test_the_share_of_vllm() -> None:
    found = answer("tonnage plan rl qwen2.5-3b --gpus h100 --rollout-gpus 0 --completion 1k")
    best = found["best"]
    # 256 completions of 1,024 tokens and 32 prompts of 512, of 36 KiB a token, beside 5.75 GiB of weights.
    cache = (256 * 1024 + 32 * 512) * 36 * 1024
    share = (cache + 2 * 3.086e9) / found["capacity_bytes"]
    assert best["rollout"]["waves"] == 1 and share < best["engine"]["utilization"] < share + 0.05
    less = answer("tonnage plan rl qwen2.5-3b --gpus h100 --rollout-gpus 0 --completion 1k --utilization 0.12")
    assert less["best"]["rollout"]["waves"] > 1
    assert phase(less, "rollout")["seconds"] > phase(found, "rollout")["seconds"]


# Q: GRPO with LoRA on one card of 24 GB: which model?
def test_adapters_on_a_card_of_24_gb() -> None:
    words = "--gpus rtx-4090 --prompts 8 --completion 1k"
    assert answer(f"tonnage plan rl qwen2.5-3b {words} --lora 16")["fits"]
    assert answer(f"tonnage plan rl qwen2.5-7b {words} --qlora")["fits"]
    # Twice the weights in 16 bits, those of the trainer and of the engine, are 28 GiB.
    assert not answer(f"tonnage plan rl qwen2.5-7b {words} --lora 16 --offload none")["fits"]


# Q: Does vLLM's sleep mode help?
def test_sleep_mode() -> None:
    words = "tonnage plan rl qwen2.5-3b --gpus h100 --rollout-gpus 0 --completion 1k"
    awake, asleep = answer(f"{words} --no-sleep"), answer(f"{words} --sleep")
    assert awake["status"] == asleep["status"] == 0
    assert asleep["best"]["step_s"] < 0.9 * awake["best"]["step_s"]
    kept = [held(phase(one, "train actor"), "engine", "parameters") for one in (awake, asleep)]
    assert kept[0] > 2 * 3.08e9 and kept[1] == 0


# Q: PPO with a critic and a reward model on 8 H100s: what is offloaded?
def test_ppo_on_8_h100s() -> None:
    found = answer("tonnage plan rl llama-3.1-8b --gpus 8xh100 --algorithm ppo --reward llama-3.1-8b")
    best = found["best"]
    assert found["status"] == 0 and best["offload"] == ["reference", "optimizer"]
    assert [one["name"] for one in best["timeline"]] == [
        "rollout", "reward", "reference", "old log-probs", "values", "train actor", "train critic", "sync",
    ]  # fmt: skip
    assert held(phase(found, "rollout"), "reference", "parameters") == 0
    assert held(phase(found, "reference"), "reference", "parameters") > 2 * 8.03e9 / 8
    assert held(phase(found, "train actor"), "critic", "optimizer_states") == 0
    here = [one for one in found["alternatives"] if not one["offload"]]
    assert all(one["step_s"] > best["step_s"] for one in here)


# Q: Separate GPUs for rollouts, or the same: which is faster for 32B on 16 H100s?
def test_separate_gpus_for_rollouts() -> None:
    found = answer("tonnage plan rl qwen2.5-32b --gpus 2x8xh100")
    apart = [one for one in found["alternatives"] if one["rollout_gpus"]]
    assert found["best"]["rollout_gpus"] == 0 and apart
    assert apart[0]["step_s"] > 1.5 * found["best"]["step_s"]


# Q: How large a group can be generated at once with completions of 8k?
def test_a_group_of_long_completions() -> None:
    found = answer("tonnage plan rl qwen2.5-7b --gpus h200 --precision bf16 --prompts 1 --group 256 --completion 8k")
    best = found["best"]
    # 56 KiB a token; what is left beside 8 bytes of each weight, the engine's weights and 5 % of the card.
    left = 0.95 * found["capacity_bytes"] - 8 * 7.615e9
    assert best["fits"] and best["rollout"]["batch"] == pytest.approx(left / (8192 * 56 * 1024), rel=0.1)
