"""Bodies that no one would write: each gets an answer or a 4xx in OpenAI's shape, and none gets more."""

import json
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.server.fake_engine import FakeEngine
from serve.server.live import MODEL, Live, serving
from tonnage.serve.server.schemas import ChatRequest, CompletionRequest

numbers = st.integers() | st.floats() | st.sampled_from([0, -0.0, 1, -1, 2**31, 2**63, 10**40, 1e308])
words = st.text(max_size=20) | st.sampled_from(["", "\x00", "\ud800", "🚢", "stop", MODEL])
json_values = st.recursive(
    st.none() | st.booleans() | numbers | words,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4),
    max_leaves=8,
)
sensible = {
    "max_tokens": st.integers(1, 8),
    "n": st.integers(1, 3),
    "stop": st.text(min_size=1, max_size=4) | st.lists(st.text(min_size=1, max_size=4), max_size=4),
    "stream": st.booleans(),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.1, 1),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "logprobs": st.integers(0, 5) | st.booleans(),
    "user": st.text(max_size=8),
    "prompt": st.text(max_size=40)
    | st.lists(st.integers(0, 400), max_size=40)
    | st.lists(st.text(max_size=8), max_size=3),
    "messages": st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "system", "assistant", "tool"]), "content": st.text(max_size=9)}
        ),
        max_size=4,
    ),
}


def bodies(kind: type) -> st.SearchStrategy[dict]:
    """A request that makes sense, with some fields replaced by anything."""
    base = {"model": st.just(MODEL)} | {
        name: sensible[name] for name in ("prompt", "messages") if name in kind.model_fields
    }
    known = {name: sensible.get(name, json_values) | json_values for name in kind.model_fields if name not in base}
    return st.builds(
        lambda base, known, odd: base | known | odd,
        st.fixed_dictionaries(base),
        st.fixed_dictionaries({}, optional=known),
        st.dictionaries(st.sampled_from(sorted(kind.model_fields)) | words, json_values, max_size=1),
    )


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(FakeEngine(context=48)) as running:
        yield running


def check(live: Live, path: str, content: bytes) -> None:
    answer = live.client.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code < 500, (content, answer.text)
    assert "Traceback" not in answer.text
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert isinstance(error["message"], str) and error["message"] and len(answer.content) < 4000
        assert set(error) == {"message", "type", "param", "code"}


@given(body=bodies(CompletionRequest))
@settings(max_examples=250)
def test_completions_of_anything(live: Live, body: dict) -> None:
    check(live, "/v1/completions", json.dumps(body).encode())


@given(body=bodies(ChatRequest))
@settings(max_examples=250)
def test_chats_of_anything(live: Live, body: dict) -> None:
    check(live, "/v1/chat/completions", json.dumps(body).encode())


@given(content=st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
@settings(max_examples=150)
def test_anything_at_all(live: Live, content: bytes) -> None:
    check(live, "/v1/completions", content)


def test_the_server_is_none_the_worse(live: Live) -> None:
    live.until_quiet()
    assert live.complete().status_code == 200 and not live.worker.broken
