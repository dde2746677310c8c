"""An engine on a live module: one copy of the weights, and what an optimizer writes is what is served."""

import pytest
import torch
from torch import nn

from serve.families import CASES, random_prompts
from serve.models.tiny import make_model as model_of
from tonnage.errors import BadModel, RequestError
from tonnage.serve import Engine, Sampling
from tonnage.serve.config import EngineConfig
from tonnage.serve.models.sharing import share_decoder

TOKENS = 8
SETTINGS = EngineConfig(blocks=40, block=4, context=64, max_seqs=4, batched_tokens=32)
GREEDY = Sampling(max_tokens=TOKENS, temperature=0, ignore_eos=True)


def reference(model: nn.Module, prompt: list[int]) -> list[int]:
    """What transformers generates, greedily and token by token."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(TOKENS):
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def check(engine: Engine, model: nn.Module, prompts: list[list[int]]) -> list[list[int]]:
    answers = [output.token_ids for output in engine.generate(prompts, GREEDY)]
    assert answers == [reference(model, prompt) for prompt in prompts]
    return answers


def train(model: nn.Module, steps: int = 2) -> None:
    """Enough that greedy tokens change."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True)
    tokens = torch.arange(2, 26).view(2, 12)
    for _ in range(steps):
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("case", CASES)
def test_tokens_after_an_update_are_those_of_transformers(case: str) -> None:
    model = model_of(case)
    engine, prompts = Engine.of_module(model, settings=SETTINGS), random_prompts(3, 3, longest=20)
    before = check(engine, model, prompts)
    engine.sleep()
    train(model)
    engine.wake()
    assert check(engine, model, prompts) != before


def test_prefixes_of_old_weights_are_forgotten_without_sleep() -> None:
    model, prompts = model_of("qwen3"), random_prompts(3, 3, longest=20)
    engine = Engine.of_module(model, settings=SETTINGS)
    check(engine, model, prompts)
    train(model)
    engine.refresh()
    check(engine, model, prompts)


def test_there_is_one_copy_of_the_weights() -> None:
    model = model_of("qwen3")
    decoder = share_decoder(model)
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in model.parameters()}
    assert sum(storages.values()) == decoder.weight_bytes == sum(one.nbytes for one in set(model.parameters()))
    assert decoder.blocks[0].qkv.weight.untyped_storage().data_ptr() in storages
    assert all(one.is_contiguous() for one in model.parameters())


def test_sleep_frees_the_cache_and_takes_no_requests() -> None:
    engine = Engine.of_module(model_of("llama"), settings=SETTINGS)
    size = engine.runner.cache.pages.nbytes
    assert size == engine.runner.cache.size_bytes > 0
    engine.sleep()
    assert engine.runner.cache.pages.nbytes == 0 and not engine.runner.cache.layers
    with pytest.raises(RequestError, match="asleep"):
        engine.submit([1, 2, 3], GREEDY)
    engine.wake()
    engine.wake()
    assert engine.runner.cache.pages.nbytes == size


def test_a_busy_engine_does_not_sleep() -> None:
    engine = Engine.of_module(model_of("llama"), settings=SETTINGS)
    engine.submit([1, 2, 3], GREEDY)
    with pytest.raises(RequestError, match="still has sequences"):
        engine.sleep()


def test_adapters_are_served_once_they_are_merged() -> None:
    import peft

    base = model_of("qwen3")
    prompts = random_prompts(3, 3, longest=20)
    plain = [reference(base, prompt) for prompt in prompts]
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    engine = Engine.of_module(model, settings=SETTINGS)
    assert [output.token_ids for output in engine.generate(prompts, GREEDY)] == plain
    model.merge_adapter()
    engine.refresh()
    assert check(engine, model, prompts) != plain
    model.unmerge_adapter()


def test_weights_that_cannot_be_shared_are_named() -> None:
    model = model_of("llama")
    model.model.layers[1].self_attn.q_proj = nn.Linear(8, 8)
    with pytest.raises(BadModel, match=r"layers\.1\.self_attn\.q_proj\.weight"):
        share_decoder(model)
