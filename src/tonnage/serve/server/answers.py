"""Format tokens as JSON: text, log probabilities in both of OpenAI's styles, usage. Knows neither HTTP nor the engine."""

import json
import time
import uuid
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from tonnage.serve.sampling import AnswerDelta, TokenLogprob
from tonnage.serve.text import Answer, Tokenizer

JsonObject = dict[str, Any]
# ASCII only: some clients end a line at other Unicode separators.
_ENCODER = json.JSONEncoder(separators=(",", ":"))


class Format:
    """The response format of completions; `ChatFormat` overrides what differs."""

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, tokenizer: Tokenizer | None, *, logprobs: bool, token_ids: bool) -> None:
        self._tokenizer, self._logprobs, self._token_ids = tokenizer, logprobs, token_ids
        name = f"{self.prefix}-{uuid.uuid4().hex}"
        self._frame = {"id": name, "object": self.whole, "created": int(time.time()), "model": model}
        # What all chunks of a stream share.
        self._head = b"data: " + _json(self._frame | {"object": self.part})[:-1] + b',"choices":['

    def complete(self, answers: Iterable[Answer], usage: JsonObject) -> JsonObject:
        """Return the whole response."""
        choices = [self._choice(answer.all, 0, whole=True) for answer in answers]
        return self._frame | {"choices": choices, "usage": usage}

    def opening(self, answers: Iterable[Answer]) -> bytes:
        """Return what a stream sends before the first token."""
        return b""

    def chunk(self, answer: Answer, piece: AnswerDelta) -> bytes:
        """Return one chunk of a stream."""
        start = answer.characters
        if self._logprobs:
            answer.characters += sum(len(self._text(token_id)) for token_id in piece.token_ids)
        return self._event(self._choice(piece, start, whole=False))

    def usage_chunk(self, usage: JsonObject) -> bytes:
        """Return the last chunk of a stream that requested usage."""
        return self._head + b'],"usage":' + _json(usage) + b"}\n\n"

    def _event(self, choice: JsonObject) -> bytes:
        return self._head + _json(choice) + b"]}\n\n"

    def _content(self, text: str, *, whole: bool) -> JsonObject:
        return {"text": text}

    def _choice(self, piece: AnswerDelta, start: int, *, whole: bool) -> JsonObject:
        content = self._content(piece.text, whole=whole)
        logprobs = self._logprob_object(piece.logprobs, start) if self._logprobs else None
        choice = {"index": piece.index, **content, "logprobs": logprobs, "finish_reason": piece.finish_reason}
        # Without a tokenizer there is nothing but the ids.
        return choice | {"token_ids": piece.token_ids} if self._token_ids or self._tokenizer is None else choice

    def _logprob_object(self, logprobs: Sequence[TokenLogprob], start: int) -> JsonObject:
        texts = [self._text(each.token_id) for each in logprobs]
        # The sampled token is always included, so there may be one more than requested.
        best = [
            {self._text(token): _finite(value) for token, value in (*each.alternatives, (each.token_id, each.logprob))}
            for each in logprobs
        ]
        return {
            "tokens": texts,
            "token_logprobs": [_finite(each.logprob) for each in logprobs],
            "top_logprobs": best,
            "text_offset": [*accumulate(map(len, texts[:-1]), initial=start)] if texts else [],
        }

    def _text(self, token_id: int) -> str:
        return self._tokenizer.token_text(token_id) if self._tokenizer is not None else f"token_id:{token_id}"


class ChatFormat(Format):
    """The response format of chat completions: messages and deltas instead of texts."""

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, answers: Iterable[Answer]) -> bytes:
        """Return the first chunk of each answer, which names the role."""
        choice = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return b"".join(self._event({"index": answer.index} | choice) for answer in answers)

    def _content(self, text: str, *, whole: bool) -> JsonObject:
        if whole:
            return {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"delta": {"content": text} if text else {}}

    def _logprob_object(self, logprobs: Sequence[TokenLogprob], start: int) -> JsonObject:
        return {
            "content": [
                self._named(each.token_id, each.logprob)
                | {"top_logprobs": [self._named(token, value) for token, value in each.alternatives]}
                for each in logprobs
            ],
            "refusal": None,
        }

    def _named(self, token_id: int, logprob: float) -> JsonObject:
        raw = list(self._tokenizer.token_bytes(token_id)) if self._tokenizer is not None else None
        return {"token": self._text(token_id), "logprob": _finite(logprob), "bytes": raw}


def _json(data: JsonObject) -> bytes:
    return _ENCODER.encode(data).encode()


def _finite(logprob: float) -> float:
    """Clamp to OpenAI's lowest value: JSON has no infinity."""
    return logprob if logprob > -9999.0 else -9999.0


def usage_of(prompts: Sequence[Sequence[int]], answers: Iterable[Answer], cached_tokens: int) -> JsonObject:
    """Return the token counts of a request."""
    prompt = sum(map(len, prompts))
    sampled = sum(answer.tokens for answer in answers)
    counts = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
    return counts | {"prompt_tokens_details": {"cached_tokens": cached_tokens}}


def error_event(body: JsonObject) -> bytes:
    """Return an error event for the middle of a stream."""
    return b"data: " + _json(body) + b"\n\n"


DONE = b"data: [DONE]\n\n"
