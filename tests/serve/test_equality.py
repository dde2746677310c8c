"""Greedy tokens are those of transformers' `generate`, whatever the engine does on the way; and what it does is forced."""

from random import Random

import pytest

from serve.families import CASES, Watched, expected, random_prompts, saved
from tonnage.serve import Sampling

TOKENS = 10


def check(engine: Watched, case: str, prompts: list[list[int]], answers_per_prompt: int = 1) -> None:
    """Every prompt alone gets one answer, every fourth `draws` of them; all are the reference's."""
    wishes = [
        Sampling(max_tokens=TOKENS, temperature=0, n=answers_per_prompt if index % 4 == 0 else 1)
        for index in range(len(prompts))
    ]
    outputs = iter(engine.generate(prompts, wishes))
    for prompt, wish in zip(prompts, wishes, strict=True):
        for _ in range(wish.n):
            output = next(outputs)
            assert output.token_ids == expected(case, tuple(prompt), TOKENS), (case, len(prompt))
            assert output.finish_reason == ("length" if len(output.token_ids) == TOKENS else "stop")
            assert output.prompt_token_ids == prompt
    assert next(outputs, None) is None
    assert engine.kv_ledger().used_bytes == engine.kv_ledger().slack_bytes == 0


@pytest.mark.parametrize("case", CASES)
def test_chunks_prefixes_preemptions_and_draws(case: str) -> None:
    engine = Watched(saved(case), block=4, blocks=16, max_seqs=5, batched_tokens=9, device="cpu")
    prompts = random_prompts(5, 9, longest=30, shared=13)
    check(engine, case, prompts, answers_per_prompt=3)
    counters = engine.scheduler.counters
    assert engine.chunk_boundaries and engine.mixed_steps and engine.copies
    assert counters.preemptions and counters.prefix_hits
    assert counters.swaps == 0


@pytest.mark.parametrize(
    "case", ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "mixtral", "qwen3_moe"]
)
def test_swaps(case: str) -> None:
    options = {"block": 4, "blocks": 12, "max_seqs": 6, "batched_tokens": 32}
    engine = Watched(saved(case), swap=2**20, device="cpu", **options)
    check(engine, case, random_prompts(7, 8, longest=20, shared=6), answers_per_prompt=2)
    assert engine.scheduler.counters.swaps and engine.swaps_in


@pytest.mark.parametrize("block", [1, 3, 16])
@pytest.mark.parametrize("seed", range(3))
def test_blocks_of_other_sizes(block: int, seed: int) -> None:
    engine = Watched(saved("qwen3"), block=block, blocks=1 + 80 // block, max_seqs=3, batched_tokens=5, device="cpu")
    check(engine, "qwen3", random_prompts(seed, 8, longest=40, shared=17), answers_per_prompt=2)
    assert engine.chunk_boundaries and engine.mixed_steps


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_same_prompts_again(prefix_cache: bool) -> None:
    engine = Watched(saved("llama"), block=4, blocks=200, prefix_cache=prefix_cache, device="cpu")
    prompts = random_prompts(3, 6, longest=40)
    check(engine, "llama", prompts)
    check(engine, "llama", prompts)
    assert bool(engine.scheduler.counters.prefix_hits) == prefix_cache


def test_one_sequence_that_fills_the_whole_cache() -> None:
    engine = Watched(saved("llama"), block=4, blocks=9, max_seqs=2, batched_tokens=6, device="cpu")
    prompts = random_prompts(5, 3, longest=18)
    check(engine, "llama", [*prompts, [1] * (32 - TOKENS)])


@pytest.mark.parametrize("seed", range(12))
def test_any_settings(seed: int) -> None:
    random = Random(seed)
    block = random.randint(1, 9)
    options = {
        "block": block, "blocks": random.randint(-(-41 // block), 200 // block) + 1, "max_seqs": random.randint(1, 7),
        "batched_tokens": random.randint(1, 40), "prefix_cache": random.random() < 0.7,
        "swap": random.choice((0, 2**14, 2**20)), "max_waiting": random.choice((3, 1024)),
    }  # fmt: skip
    engine = Watched(saved("qwen3"), device="cpu", **options)
    check(engine, "qwen3", random_prompts(1, 8, longest=30, shared=11), answers_per_prompt=3)
