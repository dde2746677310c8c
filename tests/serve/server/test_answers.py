import json
import math

from serve.server.fake_engine import STORY, STORY_IDS, TOKENIZER
from tonnage.serve.sampling import AnswerDelta, Sampling, TokenLogprob
from tonnage.serve.server.answers import ChatFormat, Format, error_event, usage_of
from tonnage.serve.text import Answer


def delivery(*token_ids: int, reason: str | None = None, logprob: float | None = None) -> AnswerDelta:
    scores = [] if logprob is None else [TokenLogprob(token, logprob, ((token, logprob),)) for token in token_ids]
    return AnswerDelta(0, "", list(token_ids), scores, reason)


def test_what_is_held_back_comes_with_the_next_piece() -> None:
    answer = Answer(0, [5], Sampling(stop=(" brown cow",), logprobs=0), TOKENIZER)
    pieces = [answer.take(delivery(token, logprob=-1.0)) for token in STORY_IDS]
    told = [piece for piece in pieces if piece is not None]
    assert len(told) < len(pieces)
    assert [token for piece in told for token in piece.token_ids] == STORY_IDS[: len(answer.all.token_ids)]
    assert all(len(piece.logprobs) == len(piece.token_ids) for piece in told)
    answer.take(delivery(reason="length"))
    assert answer.all.text == STORY and answer.all.token_ids == STORY_IDS and answer.finished


def test_many_tokens_at_once_stop_where_one_by_one_would() -> None:
    together = Answer(0, [5], Sampling(stop=("fox",)), TOKENIZER)
    together.take(delivery(*STORY_IDS))
    one_by_one = Answer(0, [5], Sampling(stop=("fox",)), TOKENIZER)
    for token in STORY_IDS:
        one_by_one.take(delivery(token))
    assert together.all == one_by_one.all and together.all.finish_reason == "stop"


def test_nothing_follows_the_end() -> None:
    answer = Answer(0, [5], Sampling(), TOKENIZER)
    answer.take(delivery(STORY_IDS[0], reason="stop"))
    assert answer.take(delivery(STORY_IDS[1])) is None and answer.tokens == 1


def test_what_cannot_be_drawn_is_still_json() -> None:
    answer = Answer(0, [5], Sampling(logprobs=1), TOKENIZER)
    answer.take(delivery(7, reason="length", logprob=-math.inf))
    for kind in (Format, ChatFormat):
        whole = kind("m", TOKENIZER, logprobs=True, token_ids=False).complete([answer], usage_of([[5]], [answer], 0))
        assert "Infinity" not in json.dumps(whole)


def test_an_event_is_one_line_whatever_it_holds() -> None:
    line = error_event({"text": "a\r\nb\u2028c\x85d"})
    assert len(line.decode().rstrip("\n").splitlines()) == 1
    assert json.loads(line.removeprefix(b"data: ")) == {"text": "a\r\nb\u2028c\x85d"}
