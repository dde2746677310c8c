"""How tokens are drawn, and what comes back: the words that a request and its answer are made of.

This module knows no torch and no scheduler; its limits are those that a server may hand to strangers.
"""

from dataclasses import dataclass, field
from typing import Literal

from tonnage.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]
# Draws of one prompt, alternatives of one token, stop strings and their length: limits on what one request may ask for.
MOST_DRAWS = 128
MOST_LOGPROBS = 20
MOST_STOPS = 16
LONGEST_STOP = 1024
# A colder draw is greedy but for rounding; far below, a logit over its temperature is more than FP32 holds.
_COLDEST = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """One request's wishes. `temperature` 0 is greedy (or below 1e-6); `top_k` 0 and `top_p` 1 take in every token.

    `logprobs` asks for that many alternatives of each token (0: of the drawn token alone; None: none at all).
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _within("max_tokens", self.max_tokens, 1, 2**31)
        _within("temperature", self.temperature, 0, 100)
        _within("top_p", self.top_p, 0, 1)
        _within("top_k", self.top_k, 0, 2**31)
        _within("min_p", self.min_p, 0, 1)
        _within("n", self.n, 1, MOST_DRAWS)
        if isinstance(self.stop, str):  # each of its letters would be one
            raise RequestError(f"stop is the text {self.stop[:80]!r}.", hint="Give several: a tuple, if only of one.")
        _within("the number of stop strings", len(self.stop) + len(self.stop_token_ids), 0, MOST_STOPS)
        for text in self.stop:
            _within("the length of a stop string", len(text), 1, LONGEST_STOP)
        if self.seed is not None:
            _within("seed", self.seed, -(2**63), 2**63 - 1)
        if self.logprobs is not None:
            _within("logprobs", self.logprobs, 0, MOST_LOGPROBS)
        if self.top_p == 0:
            raise RequestError("top_p 0 leaves no token to draw.", hint="Use temperature 0 for the likeliest token.")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is drawn, whatever the seed."""
        return self.temperature < _COLDEST

    @property
    def filtered(self) -> bool:
        """Whether some tokens are ruled out before one is drawn."""
        return not self.greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


def _within(name: str, number: float, low: float, high: float) -> None:
    # NaN is within nothing.
    if not low <= number <= high:
        raise RequestError(f"{name} is {number}.", hint=f"Give {name} between {low} and {high}.")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A drawn token's log probability, and the likeliest alternatives, best first."""

    token_id: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Output:
    """One finished answer. `text` is empty where the model has no tokenizer."""

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    prompt_token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
