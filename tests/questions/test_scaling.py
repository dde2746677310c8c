"""Questions about many GPUs: docs/questions/scaling.md."""

from questions.asking import answer


# Q: How many GPUs does it take to train a 70B model?
def test_cards_for_a_70b_model() -> None:
    found = answer("tonnage plan train llama-3.1-70b --gpus 8xh100 --seq 8k --offload none")
    # 16 bytes a parameter are 1,051 GiB, which 8 cards of 80 GB do not hold. 16 do, but a host's eight ranks cannot load
    # the model into 2 TiB where each copies it, and what loads it in parts needs more of a card.
    assert found["status"] == 1
    assert any("32xh100" in remedy["flag"] for remedy in found["remedies"])
    assert answer("tonnage plan train llama-3.1-70b --gpus 16xh100 --seq 8k --offload none")["status"] == 1
    assert answer("tonnage plan train llama-3.1-70b --gpus 32xh100 --seq 8k --offload none")["status"] == 0
    roomy = "tonnage plan train llama-3.1-70b --gpus 16xh100 --seq 8k --offload none --host-memory 5t"
    assert answer(roomy)["status"] == 0


# Q: What is the longest context I can train an 8B model with on 8 H100s?
def test_a_long_context_is_spread_over_the_cards() -> None:
    words = "tonnage plan train llama-3.1-8b --gpus 8xh100 --seq 512k --global-batch 1 --offload none"
    config = answer(words)["best"]["config"]
    assert config["tp"] * config["cp"] == 8 and config["checkpoint"] == "full"
    assert answer(f"{words} --cp 1 --tp 1")["status"] == 1


# Q: FSDP or tensor parallelism for a 70B model on 32 H100s?
def test_sharding_beats_tensor_parallelism_where_it_fits() -> None:
    words = "tonnage plan train llama-3.1-70b --gpus 4x8xh100 --seq 4k --offload none"
    best, split = answer(words)["best"], answer(f"{words} --tp 8")["best"]
    assert best["config"]["tp"] == 1 and best["config"]["zero"] == 3
    assert best["tokens_per_s"] > 1.1 * split["tokens_per_s"]


# Q: Is it worth renting H200s instead of H100s?
def test_prices_of_two_cards() -> None:
    words = "--seq 8k --tokens 10B --price"
    less = answer(f"tonnage plan train llama-3.1-8b --gpus 8xh100 {words} 2.50")
    more = answer(f"tonnage plan train llama-3.1-8b --gpus 8xh200 {words} 3.20")
    assert less["best"]["tokens_per_s"] < more["best"]["tokens_per_s"]
    assert less["best"]["training_cost"] < more["best"]["training_cost"]


# Q: How do I lay out a mixture of experts?
def test_experts_stay_within_a_host() -> None:
    words = "tonnage plan train mixtral-8x7b --gpus 2x8xh100 --seq 4k --offload none"
    spread, sharded = answer(f"{words} --framework megatron")["best"], answer(words)["best"]
    assert 1 < spread["config"]["ep"] <= 8
    assert spread["tokens_per_s"] > 1.1 * sharded["tokens_per_s"]


# Q: Can a cluster of 2,048 H100s train DeepSeek-V3?
def test_deepseek_v3_on_2048_cards() -> None:
    # What the page shows is found among 3.7 million configurations: here are those of a micro-batch of 1, without cp.
    words = "--gpus 256x8xh100 --seq 4k --global-batch 15360 --micro-batch 1 --cp 1"
    found = answer(f"tonnage plan train deepseek-v3 {words}")
    assert found["status"] == 0 and found["best"]["config"]["ep"] > 1
