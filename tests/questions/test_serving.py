"""Questions about serving: docs/questions/serving.md."""

import pytest

from questions.asking import answer
from tonnage.units import GIB


# Q: How many users can Llama-3.1-70B serve on 4 × H100 at 32k?
def test_users_of_a_70b_on_four_cards() -> None:
    plain = answer("tonnage plan serve llama-3.1-70b --gpus 4xh100 --context 32k --users 12")
    eight = answer("tonnage plan serve llama-3.1-70b --gpus 4xh100 --context 32k --users 12 --kv fp8")
    assert plain["status"] == 0
    # A card keeps two of eight KV heads of 80 layers; 33 GiB of it are weights.
    assert plain["kv"]["bytes_per_token"] == 80 * 2 * 2 * 128 * 2
    assert plain["most_users"] == plain["kv"]["tokens"] // 32768 == 13
    assert eight["most_users"] == pytest.approx(2 * plain["most_users"], abs=1)


# Q: Will Llama-3.3-70B Q4_K_M run on a 24 GB card with the rest in RAM, and how fast?
def test_a_70b_with_half_of_it_in_memory() -> None:
    found = answer("tonnage plan serve llama-3.3-70b --weights q4_k_m --gpus rtx-4090 --engine llama.cpp")
    assert found["status"] == 0
    # The file has 39.6 GiB; a card of 24 GB holds about half of it beside its cache.
    whole = sum(card["weights_bytes"] for card in found["cards"]) + found["host"]["weights_bytes"]
    assert whole / GIB == pytest.approx(39.6, abs=0.1)
    assert 0.4 < found["gpu_layers"] / found["layers"] < 0.6
    # 20 GiB at 90 GB/s take 0.24 s a token, the card's 20 GiB at 1 TB/s a tenth of that.
    assert 3 < found["decode"]["tokens_per_s"] < 5


# Q: What mem-fraction-static should I give SGLang?
def test_the_share_of_sglang() -> None:
    usual = answer("tonnage plan serve llama-3.1-8b --gpus h100 --engine sglang")
    assert usual["status"] == 0
    # SGLang leaves 0.5 + 12 + 0.5 + 0.45 + 0.125 GiB of the card by its own formula.
    assert usual["config"]["utilization"] == pytest.approx(1 - 13.58 / 79.65, abs=0.003)
    offered = [change["flag"] for change in usual["changes"] if change["flag"].startswith("--utilization")]
    more = answer(f"tonnage plan serve llama-3.1-8b --gpus h100 --engine sglang {offered[0]}")
    assert more["status"] == 0 and more["kv"]["tokens"] > usual["kv"]["tokens"]
    assert more["needed_bytes"] <= more["available_bytes"] <= more["capacity_bytes"]


# Q: Can I run an LLM and an embedding model on one L40S?
def test_two_models_on_one_card() -> None:
    found = answer(
        'tonnage plan serve llama-3.1-8b --gpus l40s --users 16 --beside "qwen3-embedding-0.6b --context 2k --users 16"'
    )
    assert found["status"] == 0
    (other,) = found["beside"]
    context = 2 * 0.66  # GiB: each process has its own
    shares = (found["config"]["utilization"] + other["share"]) * found["capacity_bytes"] / GIB
    assert shares + context <= found["capacity_bytes"] / GIB
    assert other["most_users"] >= 16 and found["most_users"] >= 16
    crowded = answer('tonnage plan serve llama-3.1-8b --gpus l40s --users 30 --beside "qwen3-8b --users 4"')
    assert crowded["status"] == 1


# Q: DeepSeek-R1 on 8 × H200 with SGLang?
def test_deepseek_r1_with_sglang() -> None:
    found = answer("tonnage plan serve deepseek-r1 --gpus 8xh200 --engine sglang --tp 8 --context 32k --users 16")
    assert found["status"] == 0
    # 671 GB of FP8 over eight cards; a token keeps 61 × 576 numbers, the same on every card.
    assert found["ledger"]["parameters_bytes"] / 1e9 == pytest.approx(671 / 8, rel=0.03)
    assert found["kv"]["bytes_per_token"] == 61 * 576 * 2
    assert found["kv"]["tokens"] > 500_000


# Q: gpt-oss-120b on one H100?
def test_gpt_oss_120b_on_one_card() -> None:
    found = answer("tonnage plan serve gpt-oss-120b --gpus h100 --context 32k --users 2")
    assert found["status"] == 0
    assert found["ledger"]["parameters_bytes"] / GIB == pytest.approx(64.4, abs=0.5)  # as vLLM logs it
    assert found["most_users"] == 2
    assert answer("tonnage plan serve gpt-oss-120b --gpus a100-40 --context 32k --users 2")["status"] == 1


# Q: How many layers of a 32B Q4 go on a 12 GB card?
def test_layers_of_a_32b_on_12_gb() -> None:
    found = answer("tonnage plan serve qwen2.5-32b --weights q4_k_m --gpus rtx-3060 --engine llama.cpp")
    assert found["status"] == 0
    # A layer has 0.28 GiB with its cache of 8k; 12 GB less context, head and a GiB that is left free are 9.
    assert found["gpu_layers"] == pytest.approx(31, abs=2)
    fewer = answer("tonnage plan serve qwen2.5-32b --weights q4_k_m --gpus rtx-3060 --engine llama.cpp --context 32k")
    assert fewer["gpu_layers"] < found["gpu_layers"]


# Q: A 7B model in a 20-GB MIG slice?
def test_a_7b_in_a_slice() -> None:
    found = answer("tonnage plan serve qwen2.5-7b --gpus h100:2g.20gb --context 8k --users 4")
    assert found["status"] == 0
    assert found["capacity_bytes"] < 20 * GIB
    assert found["most_users"] == found["kv"]["tokens"] // 8192 == 5


# Q: What does an FP8 KV cache save?
def test_an_fp8_cache() -> None:
    words = "tonnage plan serve llama-3.1-8b --gpus l4 --weights fp8 --context 8k --users 8"
    plain, eight = answer(words), answer(f"{words} --kv fp8")
    assert eight["kv"]["bytes_per_token"] * 2 == plain["kv"]["bytes_per_token"] == 131072
    assert eight["most_users"] == pytest.approx(2 * plain["most_users"], abs=1)


# Q: Which card do I need for 100 users of an 8B at 8k?
def test_cards_for_a_hundred_users() -> None:
    found = answer("tonnage plan serve llama-3.1-8b --users 100 --context 8k")
    # 100 × 8,192 tokens of 128 KiB are 100 GiB beside weights of 15.
    holding = {row["gpus"] for row in found["cards"] if row["fits"]}
    assert found["smallest"] == "h200"
    assert {"2xh100", "b200"} <= holding
    assert all(row["memory_bytes"] > 115 * GIB for row in found["cards"] if row["fits"])


# Q: TensorRT-LLM: how much KV cache is left?
def test_the_cache_of_tensorrt_llm() -> None:
    found = answer("tonnage plan serve llama-3.1-8b --gpus h100 --engine tensorrt-llm --context 8k --users 32")
    assert found["status"] == 0
    ledger = found["ledger"]
    peak = ledger["total_bytes"] - ledger["kv_cache_bytes"]
    assert ledger["kv_cache_bytes"] == pytest.approx(0.9 * (found["capacity_bytes"] - peak), rel=0.001)
    assert found["kv"]["tokens"] % 32 == 0


# Q: MacBook 36 GB: which model?
def test_a_model_for_a_macbook() -> None:
    words = "tonnage plan serve {} --weights q4_k_m --gpus m4-max:36gb --engine llama.cpp --context 16k"
    fits = answer(words.format("qwen2.5-32b"))
    assert fits["status"] == 0 and fits["capacity_bytes"] == 27 * GIB
    assert fits["gpu_layers"] == fits["layers"]
    assert answer(words.format("llama-3.3-70b"))["status"] == 1
