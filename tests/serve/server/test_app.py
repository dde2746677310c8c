"""What the routes answer, over real HTTP, with an engine whose every answer is known."""

import gzip
import json
from collections.abc import Iterator

import httpx
import pytest

from serve.server.fake_engine import STORY, STORY_IDS, TOKENIZER, VOCAB, FakeEngine
from serve.server.live import MODEL, Live, serving, until
from serve.tiny import byte_level_tokenizer
from tonnage.serve.sampling import TokenLogprob
from tonnage.serve.server.answers import Format
from tonnage.serve.text import Tokenizer


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(FakeEngine()) as running:
        yield running


def said(count: int) -> str:
    return TOKENIZER.decode((STORY_IDS * 4)[:count])


def events(answer: httpx.Response) -> list[dict]:
    lines = [line for line in answer.text.split("\n\n") if line]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_completion(live: Live) -> None:
    answer = live.complete(max_tokens=10).json()
    (choice,) = answer["choices"]
    assert choice == {"index": 0, "text": said(10), "logprobs": None, "finish_reason": "length"}
    assert answer["object"] == "text_completion" and answer["model"] == MODEL
    prompt = len(TOKENIZER.encode("hello"))
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (prompt, 10, prompt + 10)


def test_sixteen_tokens_unless_told_otherwise(live: Live) -> None:
    assert live.complete().json()["usage"]["completion_tokens"] == 16


def test_a_chat(live: Live) -> None:
    answer = live.chat(max_completion_tokens=5).json()
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": said(5), "refusal": None}
    assert choice["finish_reason"] == "length" and answer["object"] == "chat.completion"


def test_a_chat_goes_on_to_the_end_of_the_context(live: Live) -> None:
    usage = live.chat().json()["usage"]
    assert usage["total_tokens"] == live.engine.context


def test_messages_in_parts_and_developers_are_understood(live: Live) -> None:
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]},
    ]
    parts = live.client.post("/v1/chat/completions", json={"model": MODEL, "messages": messages, "max_tokens": 1})
    plain = TOKENIZER.chat([{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}])
    assert parts.json()["usage"]["prompt_tokens"] == len(plain)


def test_an_answer_comes_back_as_any_client_wrote_it_down(live: Live) -> None:
    """With every field of an answer that the official client knows."""
    said_before = {"role": "assistant", "content": "hi", "refusal": None, "annotations": None, "audio": None}
    said_before |= {"function_call": None, "tool_calls": None}
    asked = {"role": "user", "content": "hello"}
    for more in ({}, {"tool_calls": [], "annotations": [], "reasoning_content": None}):
        answer = live.chat(messages=[asked, said_before | more, asked], max_tokens=1)
        assert answer.status_code == 200, answer.text


def test_the_name_of_who_speaks_reaches_the_template() -> None:
    tokenizer = Tokenizer(byte_level_tokenizer(template="{% for one in messages %}{{ one.name }}{% endfor %}"))
    with serving(FakeEngine(tokenizer=tokenizer)) as named:
        answer = named.chat(messages=[{"role": "user", "content": "", "name": "quick"}], max_tokens=1)
        assert answer.json()["usage"]["prompt_tokens"] == len(tokenizer.encode("quick"))


def test_a_stream_tells_the_same_text(live: Live) -> None:
    answer = live.complete(max_tokens=40, stream=True, stream_options={"include_usage": True})
    chunks = events(answer)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == said(40)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]][-1] == "length"
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 40
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_a_stream_of_a_chat_begins_with_who_speaks(live: Live) -> None:
    chunks = events(live.chat(max_tokens=6, stream=True, n=2))
    assert [chunk["choices"][0]["delta"].get("role") for chunk in chunks[:2]] == ["assistant"] * 2
    for index in range(2):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in mine) == said(6)
        assert mine[-1]["finish_reason"] == "length"


def test_no_usage_in_a_stream_that_did_not_ask(live: Live) -> None:
    assert all("usage" not in chunk for chunk in events(live.complete(stream=True)))


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer(live: Live, stream: bool) -> None:
    answer = live.complete(max_tokens=100, stop=["lazy do", "never"], stream=stream)
    chunks = events(answer) if stream else [answer.json()]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == STORY[: STORY.index("lazy do")]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    live.until_quiet()


def test_tokens_after_a_stop_string_are_not_counted(live: Live) -> None:
    answer = live.complete(max_tokens=100, stop="fox", return_token_ids=True).json()
    ids = answer["choices"][0]["token_ids"]
    assert answer["usage"]["completion_tokens"] == len(ids)
    assert TOKENIZER.decode(ids).endswith("fox") or "fox" in TOKENIZER.decode(ids)
    assert "fox" not in TOKENIZER.decode(ids[:-1])


def test_a_stop_token_is_not_part_of_the_text(live: Live) -> None:
    answer = live.complete(stop_token_ids=[STORY_IDS[3]]).json()
    first = STORY_IDS.index(STORY_IDS[3])
    assert answer["choices"][0]["text"] == said(first)
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_several_prompts_several_answers(live: Live) -> None:
    answer = live.complete(prompt=["hello", "the dog"], n=3, max_tokens=4).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert {choice["text"] for choice in answer["choices"]} == {said(4)}
    assert answer["usage"]["completion_tokens"] == 24


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7], [8]]])
def test_prompts_as_token_ids(live: Live, prompt: list) -> None:
    answer = live.complete(prompt=prompt, max_tokens=2).json()
    assert answer["usage"]["prompt_tokens"] == sum(len(each) if isinstance(each, list) else 1 for each in prompt)


def test_log_probabilities_of_completions(live: Live) -> None:
    found = live.complete(max_tokens=5, logprobs=2).json()["choices"][0]["logprobs"]
    assert found["tokens"] == [TOKENIZER.token_text(token) for token in STORY_IDS[:5]]
    assert found["token_logprobs"] == [-0.5] * 5
    assert [len(best) for best in found["top_logprobs"]] == [2] * 5
    assert found["text_offset"] == [len("".join(found["tokens"][:n])) for n in range(5)]


@pytest.mark.parametrize("others", [(), ((STORY_IDS[1], -0.1),)])
def test_the_drawn_token_is_among_the_likeliest_of_completions(others: tuple[tuple[int, float], ...]) -> None:
    format = Format(MODEL, TOKENIZER, logprobs=True, token_ids=False)
    (best,) = format._logprob_object([TokenLogprob(STORY_IDS[0], -3.0, others)], 0)["top_logprobs"]
    expected = [*others, (STORY_IDS[0], -3.0)]
    assert list(best.items()) == [(TOKENIZER.token_text(token), value) for token, value in expected]


def test_offsets_go_on_through_a_stream(live: Live) -> None:
    chunks = events(live.complete(max_tokens=30, logprobs=1, stream=True))
    whole = live.complete(max_tokens=30, logprobs=1).json()["choices"][0]["logprobs"]
    for key, value in whole.items():
        assert [each for chunk in chunks for each in chunk["choices"][0]["logprobs"][key]] == value


def test_log_probabilities_of_chats_carry_bytes(live: Live) -> None:
    found = live.chat(max_tokens=60, logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]["content"]
    assert bytes(byte for each in found for byte in each["bytes"]).decode(errors="ignore") == said(60)
    assert found[0]["top_logprobs"][0]["token"] == found[0]["token"]


def test_chats_with_log_probabilities_of_drawn_tokens_alone(live: Live) -> None:
    found = live.chat(max_tokens=3, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert [each["top_logprobs"] for each in found] == [[], [], []]


def test_the_models(live: Live) -> None:
    (model,) = live.client.get("/v1/models").json()["data"]
    assert model["id"] == MODEL and model["max_model_len"] == live.engine.context
    assert live.client.get(f"/v1/models/{MODEL}").json() == model
    assert live.client.get("/v1/models/other/one").status_code == 404


def test_health_and_version(live: Live) -> None:
    assert live.client.get("/health").json() == {"status": "ok"}
    assert live.client.get("/version").json()["version"]


def test_the_ledger_is_the_whole_pool(live: Live) -> None:
    found = live.client.get("/ledger").json()
    parts = {name: size for name, size in found["kv"].items() if name != "total_bytes"}
    assert set(parts) == {f"{state}_bytes" for state in "used slack cached shared reserved free".split()}
    assert sum(parts.values()) == found["kv"]["total_bytes"] == 257 * 4096
    assert found["card"]["blocks"] == 257


def test_without_a_tokenizer_ids_are_served() -> None:
    with serving(FakeEngine(tokenizer=None)) as bare:
        answer = bare.complete(prompt=[1, 2], max_tokens=3, logprobs=1)
        assert answer.json()["choices"][0]["token_ids"] == STORY_IDS[:3]
        assert [each for chunk in events(bare.complete(prompt=[1], max_tokens=3, stream=True))
                for each in chunk["choices"][0]["token_ids"]] == STORY_IDS[:3]  # fmt: skip
        assert bare.complete(prompt="text").status_code == 400
        assert bare.complete(prompt=[1], stop="x").status_code == 400
        assert bare.chat().status_code == 400


WRONG = {
    "max_tokens": [0, -1, "5", 1.5, True, []],
    "temperature": [-1, 1e9, "hot"],
    "top_p": [0, 2, -0.5],
    "n": [0, -3, 129, 10**30, 1.5],
    "stop": ["", ["a"] * 17, ["x" * 2000], [1], {}],
    "stream": ["yes", 1],
    "stream_options": [{"include_usage": True}, 5],
    "seed": [2**70, "x"],
    "logprobs": [-1, 21, "x"],
    "top_k": [-2, 1.5],
    "min_p": [2],
    "best_of": [3],
    "echo": [True],
    "suffix": ["end"],
    "frequency_penalty": [0.5],
    "presence_penalty": [-1],
    "repetition_penalty": [1.1],
    "logit_bias": [{"5": 100}],
    "user": ["u" * 2000, 7],
    "model": ["", 5, None],
    "prompt": [
        None,
        5,
        [],
        [[]],
        [-1],
        [VOCAB],
        [2**40],
        [1.5],
        [1, "a"],
        ["a", 1],
        {"a": 1},
        ["a"] * 129,
        [["a"]],
        "",
    ],
    "no_such_field": [1],
}


@pytest.mark.parametrize(("field", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_what_cannot_be_is_said_in_openai_s_words(live: Live, field: str, value: object) -> None:
    answer = live.complete(**{field: value})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (
        error["message"]
        and error["type"] == "invalid_request_error"
        and set(error) == {"message", "type", "param", "code"}
    )


def test_too_many_answers_in_one_request(live: Live) -> None:
    assert live.complete(prompt=["a"] * 100, n=3).status_code == 400
    assert live.complete(n=100).status_code == 400, "more than may wait"


WRONG_CHATS = {
    "messages": [
        [],
        "hello",
        [{"role": "user"}, 5],
        [{"role": "tool", "content": "x"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "assistant", "content": "first"}],
        [{"role": "user", "content": "x", "tool_calls": [{}]}],
    ],
    "tools": [[{"type": "function", "function": {"name": "f"}}]],
    "tool_choice": ["required"],
    "response_format": [{"type": "json_object"}],
    "top_logprobs": [2],
    "logprobs": [2],
    "audio": [{}],
    "modalities": [["audio"]],
}


@pytest.mark.parametrize(
    ("field", "value"), [(name, value) for name, values in WRONG_CHATS.items() for value in values]
)
def test_chats_that_cannot_be(live: Live, field: str, value: object) -> None:
    answer = live.chat(**{field: value})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


def test_an_image_is_refused_by_name(live: Live) -> None:
    parts = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]
    answer = live.chat(messages=[{"role": "user", "content": parts}])
    assert "image_url" in answer.json()["error"]["message"]


def test_values_that_change_nothing_are_taken(live: Live) -> None:
    neutral = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "tools": [], "tool_choice": "auto"}
    neutral |= {"response_format": {"type": "text"}, "user": "me", "store": False, "metadata": {"a": "b"}, "n": None}
    assert live.chat(max_tokens=1, **neutral).status_code == 200
    assert live.complete(best_of=1, echo=False, suffix=None, top_k=-1).status_code == 200


def test_an_unknown_model_is_not_found(live: Live) -> None:
    answer = live.complete(model="gpt-9")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"5", b'"x"', b"\xff\xfe", b'{"model": "tiny", "prompt": "\\ud800"}', b"[" * 100_000,
     b'{"model": "tiny", "prompt": "x", "temperature": NaN}', b'{"model": "tiny", "prompt": "x", "top_p": Infinity}',
     b'{"model": "tiny", "prompt": "x", "seed": 1' + b"0" * 10_000 + b"}", b'{"\\ud800": 1}'],
)  # fmt: skip
def test_bodies_that_are_no_request(live: Live, body: bytes) -> None:
    answer = live.client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"] and "Traceback" not in answer.text


def test_another_content_type_is_refused(live: Live) -> None:
    assert live.client.post("/v1/completions", data={"model": MODEL}).status_code == 415


def test_a_packed_body_is_refused_by_name(live: Live) -> None:
    body = gzip.compress(b'{"model": "tiny", "prompt": "x"}')
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    answer = live.client.post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == 415 and "gzip" in answer.json()["error"]["message"]
    headers["Content-Encoding"] = "identity"
    assert live.client.post("/v1/completions", content=gzip.decompress(body), headers=headers).status_code == 200


def test_an_empty_prompt_is_not_too_long(live: Live) -> None:
    assert live.complete(prompt="").json()["error"]["code"] is None


def test_a_prompt_longer_than_the_context(live: Live) -> None:
    answer = live.complete(prompt=[5] * 256)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    assert live.complete(prompt="the dog " * 500).status_code == 400


def test_ten_million_tokens_are_refused(live: Live) -> None:
    assert live.complete(prompt="a" * 10_000_000).status_code == 400
    body = b'{"model": "tiny", "prompt": [' + b"5," * 9_999_999 + b"5]}"
    headers = {"Content-Type": "application/json"}
    assert live.client.post("/v1/completions", content=body, headers=headers).status_code == 413
    # Without a declared length it is counted as it comes.
    pieces = (body[start : start + 2**20] for start in range(0, len(body), 2**20))
    assert live.client.post("/v1/completions", content=pieces, headers=headers).status_code == 413
    just_small_enough = b'{"model": "tiny", "prompt": [' + b"5," * 4_000_000 + b"5]}"
    assert live.client.post("/v1/completions", content=just_small_enough, headers=headers).status_code == 400


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/completions", 405), ("DELETE", "/v1/models", 405), ("GET", "/", 404), ("POST", "/v1/nothing", 404),
     ("GET", "/docs", 404), ("GET", "/openapi.json", 404), ("GET", "/v1/models/" + "x" * 5000, 404)],
)  # fmt: skip
def test_routes_that_are_not_there(live: Live, method: str, path: str, status: int) -> None:
    answer = live.client.request(method, path)
    assert answer.status_code == status and answer.json()["error"]["message"]


def test_headers_are_bounded(live: Live) -> None:
    answer = live.client.get("/health", headers={"X-Long": "x" * 100_000})
    assert 400 <= answer.status_code < 500


def test_nothing_stays_behind(live: Live) -> None:
    live.until_quiet()
    until(lambda: not live.worker.open and not live.worker._owners)
