"""Questions about objectives beyond next tokens: docs/questions/objectives.md."""

import pytest

from questions.asking import answer
from tonnage.units import GIB

LLAMA_8B, LLAMA_70B = 8_030_261_248, 70_553_706_496
VOCABULARY = 128_256
ON_8 = "tonnage plan train llama-3.1-8b --gpus 8xh100 --seq 2k"


# Q: How much more memory does DPO take than SFT?
def test_dpo_beside_next_tokens() -> None:
    words = f"{ON_8} --zero 2 --framework deepspeed --checkpoint none --loss full"
    dpo = answer(f"{words} --micro-batch 1 --objective dpo")["best"]
    plain = answer(f"{words} --micro-batch 2")["best"]
    assert dpo["frozen_bytes"] == pytest.approx(2 * LLAMA_8B)
    logits = VOCABULARY * 2 * 2048
    # Logits of both models, log-probabilities and TRL's copy, two bytes each, where a plain loss has twelve at its height, less
    # what else its forward pass has then.
    more = dpo["peak_allocated_bytes"] - plain["peak_allocated_bytes"]
    assert 2 * LLAMA_8B - 12 * logits < more < 2 * LLAMA_8B + 8 * logits


# Q: Can I DPO a 70B model on 8 × H100 with LoRA?
def test_dpo_of_70b_with_adapters() -> None:
    words = "tonnage plan train llama-3.1-70b --gpus 8xh100 --seq 2k --objective dpo"
    adapters = answer(f"{words} --lora 16")
    assert adapters["status"] == 0
    assert adapters["best"]["config"]["reference"] == "adapters-off"
    assert adapters["best"]["frozen_bytes"] == 0
    assert adapters["best"]["ledger"]["parameters_bytes"] > 2 * LLAMA_70B / 8
    assert answer(f"{words} --offload none")["status"] == 1


# Q: Does precomputing reference log-probs help?
def test_precomputed_log_probabilities() -> None:
    fixed = f"{ON_8} --objective dpo --zero 2 --framework deepspeed --checkpoint none --loss full --micro-batch 1"
    held, before = answer(fixed)["best"], answer(f"{fixed} --reference precomputed")["best"]
    assert held["peak_allocated_bytes"] - before["peak_allocated_bytes"] > 2 * LLAMA_8B
    # A pass forward is a quarter of one forward, once more forward, and backward, which is two.
    assert before["step_time_s"] / held["step_time_s"] == pytest.approx(3 / 4, abs=0.05)


# Q: How much do ORPO and SimPO save over DPO?
def test_objectives_without_a_reference() -> None:
    fixed = "--zero 2 --framework deepspeed --checkpoint none --loss full --micro-batch 1"
    dpo, orpo, simpo = (answer(f"{ON_8} --objective {name} {fixed}")["best"] for name in ("dpo", "orpo", "simpo"))
    for other in (orpo, simpo):
        assert other["frozen_bytes"] == 0
        assert dpo["peak_allocated_bytes"] - other["peak_allocated_bytes"] > 2 * LLAMA_8B
        assert other["samples_per_s"] > 1.2 * dpo["samples_per_s"]


# Q: Is KTO lighter than DPO?
def test_kto_beside_dpo() -> None:
    fixed = "--zero 2 --framework deepspeed --checkpoint none --loss full"
    dpo = answer(f"{ON_8} --objective dpo {fixed} --micro-batch 1")["best"]
    kto = answer(f"{ON_8} --objective kto {fixed} --micro-batch 2")["best"]
    assert kto["peak_allocated_bytes"] == pytest.approx(dpo["peak_allocated_bytes"], rel=0.03)
    assert kto["step_parts_s"]["no-grad forward"] == pytest.approx(3 * dpo["step_parts_s"]["no-grad forward"], rel=0.05)


# Q: Will distilling a 70B teacher into an 8B student fit on 8 × 80 GB?
def test_a_teacher_of_70b() -> None:
    found = answer(f"{ON_8} --objective distill --teacher llama-3.1-70b")
    best = found["best"]
    assert found["status"] == 0
    assert best["config"]["zero"] == 3
    assert best["frozen_bytes"] == pytest.approx(2 * LLAMA_70B / 8)
    assert best["step_parts_s"]["no-grad forward"] > best["step_time_s"] / 2
    # Whole on every GPU it cannot be.
    assert answer(f"{ON_8} --objective distill --teacher llama-3.1-70b --zero 2 --offload none")["status"] == 1


# Q: Can I train an 8B reward model on one H100?
def test_a_reward_model_of_8b() -> None:
    words = "tonnage plan train llama-3.1-8b --gpus h100 --seq 2k --objective reward"
    assert answer(f"{words} --lora 16")["status"] == 0
    alone = answer(f"{words} --offload none")
    # Parameters, gradients and Adam's states in FP32, of all but the head.
    least = 16 * (LLAMA_8B - VOCABULARY * 4096)
    assert alone["status"] == 1
    assert alone["best"]["ledger"]["total_bytes"] > least


# Q: What batch can I reach training an embedding model like bge-large on one 24 GB card?
def test_the_largest_contrastive_batch() -> None:
    words = "tonnage plan train bge-large --gpus rtx-4090 --objective contrastive"
    assert answer(f"{words} --global-batch 128")["status"] == 0
    assert answer(f"{words} --global-batch 192 --offload none")["status"] == 1
    cached = answer(f"{words} --global-batch 4096 --grad-cache")
    assert cached["status"] == 0
    assert cached["best"]["config"]["micro_batch"] * cached["best"]["config"]["accumulate"] == 4096
    assert cached["best"]["ledger"]["total_bytes"] < 24 * GIB
