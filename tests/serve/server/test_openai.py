"""A session of the official client with a real, if tiny, model on the CPU."""

import asyncio
import math
from collections.abc import Iterator

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from serve.server.live import MODEL, Live, serving, until
from serve.tiny import make_llama
from tonnage.serve import Engine

KEY = "sk-test"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = make_llama(tmp_path_factory.mktemp("tiny"))
    engine = Engine(folder, device="cpu", blocks=129, max_seqs=8, max_waiting=8, batched_tokens=64)
    with serving(engine, keys=[KEY]) as running:
        yield running


@pytest.fixture(scope="module")
def client(live: Live) -> OpenAI:
    return OpenAI(base_url=f"{live.url}/v1", api_key=KEY, max_retries=0)


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "tonnage"


def test_a_greedy_completion_is_the_engine_s_own(client: OpenAI, live: Live) -> None:
    answer = client.completions.create(model=MODEL, prompt="the quick", max_tokens=12, temperature=0)
    streamed = client.completions.create(model=MODEL, prompt="the quick", max_tokens=12, temperature=0, stream=True)
    assert answer.choices[0].text == "".join(chunk.choices[0].text for chunk in streamed)
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert answer.usage is not None and answer.usage.completion_tokens <= 12


def test_a_seed_repeats_its_answer(client: OpenAI) -> None:
    texts = [
        client.completions.create(model=MODEL, prompt="the dog", max_tokens=16, temperature=1.5, seed=seed)
        .choices[0]
        .text
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_several_draws_differ(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="the dog", max_tokens=16, temperature=1.5, n=4, seed=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in answer.choices}) > 1


def test_a_chat_and_its_stream(client: OpenAI) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "how much can it carry?"}]
    words = {"model": MODEL, "messages": messages, "max_completion_tokens": 10, "temperature": 0}
    answer = client.chat.completions.create(**words)
    chunks = list(client.chat.completions.create(**words, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    assert chunks[-1].usage == answer.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )


def test_log_probabilities_are_probabilities(client: OpenAI) -> None:
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=4,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    for token in chat.choices[0].logprobs.content:
        assert token.logprob == pytest.approx(token.top_logprobs[0].logprob), "greedy takes the likeliest"
        assert token.logprob <= 0 and sum(math.exp(best.logprob) for best in token.top_logprobs) <= 1 + 1e-6
    plain = client.completions.create(model=MODEL, prompt="hi", max_tokens=4, temperature=0, logprobs=2)
    found = plain.choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset)
    assert "".join(found.tokens).startswith(plain.choices[0].text[:1])


def test_a_stop_string(client: OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="the quick", max_tokens=30, temperature=0).choices[0].text
    stop = whole[5:8]
    cut = client.completions.create(model=MODEL, prompt="the quick", max_tokens=30, temperature=0, stop=stop).choices[0]
    assert cut.text == whole[: whole.index(stop)] and cut.finish_reason == "stop"


def test_prompts_as_ids_and_in_lists(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=[[5, 6, 7], [8, 9]], max_tokens=3)
    assert len(answer.choices) == 2 and answer.usage.prompt_tokens == 5


def test_a_prompt_that_was_seen_is_cached(client: OpenAI) -> None:
    words = {"model": MODEL, "prompt": list(range(5, 85)), "max_tokens": 1}
    client.completions.create(**words)
    assert client.completions.create(**words).usage.prompt_tokens_details.cached_tokens == 64


def test_errors_are_those_of_the_client(client: OpenAI, live: Live) -> None:
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.completions.create(model="gpt-9", prompt="x")
    with pytest.raises(openai.BadRequestError, match="logit_bias"):
        client.completions.create(model=MODEL, prompt="x", logit_bias={"5": 100})
    with pytest.raises(openai.BadRequestError, match="image_url"):
        parts = [{"type": "image_url", "image_url": {"url": "https://example.com/x.png"}}]
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": parts}])
    with pytest.raises(openai.AuthenticationError):
        OpenAI(base_url=f"{live.url}/v1", api_key="wrong", max_retries=0).models.list()


def test_a_full_queue_is_a_rate_limit(live: Live) -> None:
    async def flood() -> list[object]:
        async with AsyncOpenAI(base_url=f"{live.url}/v1", api_key=KEY, max_retries=0) as client:
            calls = [client.completions.create(model=MODEL, prompt="x", max_tokens=100, n=4) for _ in range(12)]
            return await asyncio.gather(*calls, return_exceptions=True)

    outcomes = asyncio.run(flood())
    refused = [outcome for outcome in outcomes if isinstance(outcome, openai.RateLimitError)]
    assert refused and all(int(error.response.headers["retry-after"]) >= 1 for error in refused)
    assert all(isinstance(outcome, openai.RateLimitError) or outcome.choices for outcome in outcomes)


def test_a_stream_that_is_closed_early_is_given_up(live: Live) -> None:
    async def leave() -> None:
        async with AsyncOpenAI(base_url=f"{live.url}/v1", api_key=KEY) as client:
            stream = await client.completions.create(
                model=MODEL, prompt="x", max_tokens=250, stream=True, extra_body={"ignore_eos": True}
            )
            async for _ in stream:
                await stream.close()
                return

    asyncio.run(leave())
    live.until_quiet()
    until(lambda: not live.worker.open)


def test_the_ledger_of_the_real_card(live: Live) -> None:
    found = live.client.get("/ledger").json()
    assert found["card"]["blocks"] == 129
    assert found["kv"]["total_bytes"] == 129 * found["card"]["bytes_per_block"]
