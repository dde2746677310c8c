"""The engine on a real GPU: graphs draw what eager passes draw, tokens are the reference's, memory stays within the budget."""

import gc
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import torchvision_names  # noqa: F401
from serve.models.tiny import VOCAB, make_model, save
from tonnage.serve import Engine, Sampling
from tonnage.serve.config import EngineConfig
from tonnage.serve.models.architecture import architecture_of, read_architecture
from tonnage.serve.models.load import load_decoder, random_decoder
from tonnage.units import GIB

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "initializer_range": 0.05}
CASES = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "mixtral", "qwen3_moe"]
TOKENS = 24
GREEDY = Sampling(temperature=0, max_tokens=TOKENS, ignore_eos=True)


def prompts_of(count: int, longest: int = 60, seed: int = 0) -> list[list[int]]:
    sampled = random.Random(seed)
    return [[sampled.randrange(VOCAB) for _ in range(sampled.randint(1, longest))] for _ in range(count)]


def engine_of(folder: Path, dtype: torch.dtype = torch.bfloat16, **settings: object) -> Engine:
    decoder = load_decoder(folder, read_architecture(folder), device="cuda", dtype=dtype)
    options = {"blocks": 400, "max_seqs": 24, "batched_tokens": 256, **settings}
    return Engine.of(decoder, settings=EngineConfig(**options))  # type: ignore[arg-type]


def tokens_of(engine: Engine, prompts: list[list[int]], sampling: Sampling = GREEDY) -> list[list[int]]:
    return [output.token_ids for output in engine.generate(prompts, sampling)]


@pytest.fixture(autouse=True)
def empty_card() -> Iterator[None]:
    """What a test held is given back before the next one measures."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(case: str, tmp_path: Path) -> Path:
    return save(make_model(case, **SIZES), tmp_path, max_shard_size="1GB")


def agreement(one: list[list[int]], two: list[list[int]]) -> float:
    """The share of tokens before the first difference: after it two answers have nothing in common."""
    same = 0
    for first, second in zip(one, two, strict=True):
        same += next((n for n, (a, b) in enumerate(zip(first, second, strict=True)) if a != b), len(first))
    return same / sum(map(len, one))


def reference(model: torch.nn.Module, prompts: list[list[int]]) -> list[list[int]]:
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device="cuda")
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False,
            pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        found.append(out[0, len(prompt) :].tolist())
    return found


def test_greedy_tokens_are_mostly_those_of_transformers(case: str, folder: Path) -> None:
    model = make_model(case, **SIZES).bfloat16().cuda()
    prompts = prompts_of(12)
    assert agreement(tokens_of(engine_of(folder), prompts), reference(model, prompts)) > 0.7


def test_graphs_draw_what_eager_passes_draw(case: str, folder: Path) -> None:
    """The same kernels, on padded rows: nearly every token is the same."""
    prompts = prompts_of(40)
    captured, eager = engine_of(folder), engine_of(folder, eager=True)
    assert agreement(tokens_of(captured, prompts), tokens_of(eager, prompts)) > 0.9


@pytest.mark.parametrize("case", ["qwen3", "mixtral"], indirect=True)
def test_preemption_swap_and_prefixes(case: str, folder: Path) -> None:
    # In FP32, where the order of a sum hardly ever decides between two tokens; long enough to outgrow the room to grow.
    prompts, long = prompts_of(24, seed=3), replace(GREEDY, max_tokens=64)
    roomy = tokens_of(engine_of(folder, torch.float32), prompts, long)
    tight = engine_of(folder, torch.float32, blocks=16, batched_tokens=48)
    assert agreement(tokens_of(tight, prompts, long), roomy) > 0.9
    assert tight.scheduler.counters.preemptions
    swapping = engine_of(folder, torch.float32, blocks=16, swap="64 MiB")
    assert agreement(tokens_of(swapping, prompts, long), roomy) > 0.9
    assert swapping.scheduler.counters.swaps
    again = engine_of(folder)
    first = tokens_of(again, prompts)
    assert agreement(tokens_of(again, prompts), first) > 0.7 and again.scheduler.counters.prefix_hits
    for engine in (tight, swapping, again):
        assert engine.scheduler.pool.available == engine.scheduler.pool.count - 1


@pytest.mark.parametrize("case", ["qwen3"], indirect=True)
def test_random_draws_logprobs_and_filters_within_graphs(case: str, folder: Path) -> None:
    engine, prompts = engine_of(folder), prompts_of(10)
    wishes = [
        Sampling(
            seed=n, temperature=0.8, max_tokens=TOKENS, ignore_eos=True, top_k=1 if n % 2 else 0, logprobs=n % 3 or None
        )
        for n in range(10)
    ]
    outputs = engine.generate(prompts, wishes)
    greedy = tokens_of(engine, prompts)
    filtered = [output.token_ids for n, output in enumerate(outputs) if n % 2]
    assert agreement(filtered, [tokens for n, tokens in enumerate(greedy) if n % 2]) > 0.7
    for wish, output in zip(wishes, outputs, strict=True):
        assert (output.logprobs is None) == (wish.logprobs is None)
        for token, found in zip(output.token_ids, output.logprobs or [], strict=False):
            assert found.token_id == token and found.logprob <= 0 and len(found.alternatives) == wish.logprobs
    again = engine.generate(prompts[::-1], wishes[::-1])[::-1]
    assert agreement([one.token_ids for one in again], [one.token_ids for one in outputs]) > 0.7


@pytest.mark.parametrize("case", ["qwen3"], indirect=True)
def test_an_fp8_cache_says_nearly_the_same(case: str, folder: Path) -> None:
    prompts = prompts_of(16)
    plain, small = tokens_of(engine_of(folder), prompts), tokens_of(engine_of(folder, kv="fp8"), prompts)
    assert agreement(small, plain) > 0.4


@pytest.mark.parametrize("case", ["llama"], indirect=True)
def test_out_of_memory_ends_only_the_steps_own_sequences(case: str, folder: Path) -> None:
    engine = engine_of(folder, max_seqs=2, batched_tokens=64)
    launch, launched = engine.runner.launch, 0

    def failing(step: object) -> object:
        nonlocal launched
        launched += 1
        if launched == 5:
            torch.empty(2**50, dtype=torch.uint8, device="cuda")
        return launch(step)  # type: ignore[arg-type]

    engine.runner.launch = failing  # type: ignore[method-assign, assignment]
    reasons = [output.finish_reason for output in engine.generate(prompts_of(8), GREEDY)]
    assert reasons.count("error") in (1, 2) and reasons.count("length") == 8 - reasons.count("error")
    assert engine.stats.failed_steps == 1 and engine.scheduler.pool.available == engine.scheduler.pool.count - 1


def qwen_engine(**settings: object) -> Engine:
    config = {
        "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "hidden_act": "silu",
    }  # fmt: skip
    decoder = random_decoder(architecture_of(config), "cuda", torch.bfloat16)
    return Engine.of(decoder, settings=EngineConfig(**settings))  # type: ignore[arg-type]


def used_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


@pytest.mark.parametrize("budget", ["20 GiB", 0.5])
def test_memory_stays_within_the_budget_and_fills_it(budget: str | float) -> None:
    torch.cuda.empty_cache()
    engine = qwen_engine(budget=budget, context=4096)
    card = engine.card
    assert card.measured_bytes is not None and card.measured_bytes <= card.limit_bytes
    assert card.measured_bytes > 0.97 * card.limit_bytes
    sampled = random.Random(1)
    prompts = [[sampled.randrange(10_000) for _ in range(sampled.randint(100, 1024))] for _ in range(300)]
    wishes = [
        Sampling(max_tokens=64, top_p=0.9 if n % 3 else 1.0, logprobs=5 if n % 5 == 0 else None) for n in range(300)
    ]
    before = used_bytes()
    engine.generate(prompts, wishes)
    assert used_bytes() <= before + 0.01 * card.limit_bytes
    assert engine.stats.failed_steps == 0


def test_what_others_hold_is_left_to_them() -> None:
    hold = "import sys, torch; x = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device='cuda'); print(); sys.stdin.read()"
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    held = total // 2
    with subprocess.Popen(
        [sys.executable, "-uc", hold, str(held)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdin is not None and other.stdout is not None
        other.stdout.readline()
        engine = qwen_engine(budget=0.9, max_seqs=16, batched_tokens=1024)
        assert engine.card.measured_bytes is not None
        assert engine.card.measured_bytes <= engine.card.limit_bytes <= total - held
        assert engine.card.pool.size_bytes > 4 * GIB
        engine.generate([[1, 2, 3]] * 20, Sampling(max_tokens=20))
        other.stdin.close()


def test_the_host_is_one_step_ahead() -> None:
    """The next step is on its way before the last one's tokens are read."""
    engine = qwen_engine(blocks=400, max_seqs=8, batched_tokens=512)
    order: list[str] = []
    launch, complete = engine.runner.launch, engine.scheduler.complete

    def launching(step: object) -> object:
        order.append("launch")
        return launch(step)  # type: ignore[arg-type]

    def completing(*arguments: object) -> object:
        order.append("complete")
        return complete(*arguments)  # type: ignore[arg-type]

    engine.runner.launch, engine.scheduler.complete = launching, completing  # type: ignore[method-assign, assignment]
    engine.submit([1, 2, 3], Sampling(max_tokens=6, ignore_eos=True))
    tokens = 0
    while engine.has_work:
        tokens += len(engine.advance().tokens)
    assert order[:4] == ["launch", "launch", "complete", "launch"]
    assert tokens == 6
