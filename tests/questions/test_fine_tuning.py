"""Questions about fine-tuning: docs/questions/fine-tuning.md."""

import pytest

from questions.asking import answer

GIB = 2**30


# Q: Can I fine-tune an 8B model on one RTX 4090?
def test_an_8b_model_on_a_4090() -> None:
    adapters = answer("tonnage plan train llama-3.1-8b --gpus rtx-4090 --seq 2k --qlora")
    assert adapters["status"] == 0 and adapters["best"]["config"]["offload"] == "none"
    assert answer("tonnage plan train llama-3.1-8b --gpus rtx-4090 --seq 2k --offload none")["status"] == 1


# Q: Can I train all of a 7B model on 24 GB?
def test_all_of_a_7b_model_on_24_gb() -> None:
    words = "tonnage plan train qwen2.5-7b --gpus rtx-4090 --seq 2k --precision bf16 --optimizer paged-adamw-8bit"
    assert answer(words)["status"] == 1
    best = answer(f"{words} --step-in-backward")["best"]
    assert best["fits"] and best["ledger"]["parameters_bytes"] == pytest.approx(2 * 7.62e9, rel=0.01)


# Q: Which card do I need to fine-tune an 8B model with LoRA?
def test_the_smallest_card_for_adapters_of_an_8b_model() -> None:
    found = answer("tonnage plan train llama-3.1-8b --seq 4k --lora 16")
    memory = {row["gpus"]: row for row in found["cards"]}
    # A base of 16 bits is 15 GiB; what a step adds does not fit beside it on 16 GB.
    assert memory[found["smallest"]]["memory_bytes"] > 16 * GIB
    assert memory["rtx-4090"]["fits"] and memory["rtx-4090"]["offload"] == ""


# Q: Can two RTX 3090s train a 70B model?
def test_a_70b_model_on_two_3090s() -> None:
    words = "tonnage plan train llama-3.1-70b --gpus 2xrtx-3090 --seq 1k --qlora --zero 3"
    assert answer(f"{words} --offload parameters")["status"] == 0
    assert answer(f"{words} --offload none")["status"] == 1


# Q: Does gpt-oss-120b train on one H100?
def test_a_large_mixture_on_one_card() -> None:
    best = answer(
        "tonnage plan train gpt-oss-120b --gpus h100 --seq 2k --qlora --lora-targets attention --offload none"
    )["best"]
    # 116.8 B weights of half a byte, and what is not quantised.
    assert best["fits"] and 55 * GIB < best["ledger"]["parameters_bytes"] < 62 * GIB


# Q: How much memory does gradient checkpointing save, and what does it cost?
def test_what_checkpoints_save_and_cost() -> None:
    words = "tonnage plan train llama-3.2-3b --gpus h200 --seq 8k --micro-batch 2 --offload none --loss chunked --checkpoint"
    none, full = (answer(f"{words} {way}")["best"] for way in ("none", "full"))
    assert full["ledger"]["activations_bytes"] < none["ledger"]["activations_bytes"] / 4
    # At least a forward pass of the blocks in three, and the head is not recomputed.
    assert 1.15 < full["step_time_s"] / none["step_time_s"] < 1.4


# Q: How long do three epochs over 50,000 samples take, and what do they cost?
def test_hours_and_price_of_epochs() -> None:
    found = answer(
        "tonnage plan train llama-3.1-8b --gpus 4xa100-80 --seq 2k --lora 16 --samples 50k --epochs 3 --price 1.80"
    )
    hours = 150_000 * 2048 / found["best"]["tokens_per_s"] / 3600
    assert found["best"]["training_s"] == pytest.approx(hours * 3600, rel=0.01)
    assert found["best"]["training_cost"] == pytest.approx(4 * 1.80 * hours, rel=0.01)


# Q: Is QLoRA slower than LoRA?
def test_a_base_of_four_bits_is_slower_and_smaller() -> None:
    words = "tonnage plan train llama-3.1-8b --gpus a100-80 --seq 2k --micro-batch 2"
    wide, narrow = (answer(f"{words} {way}")["best"] for way in ("--lora 16", "--qlora"))
    assert narrow["tokens_per_s"] < 0.96 * wide["tokens_per_s"]
    assert narrow["ledger"]["parameters_bytes"] < 0.4 * wide["ledger"]["parameters_bytes"]
