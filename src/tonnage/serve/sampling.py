"""Sampling parameters of a request, with limits that are safe for untrusted clients, and its output. Knows no torch."""

from dataclasses import dataclass, field
from typing import Literal

from tonnage.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]
# Limits per request: samples of one prompt, log probabilities per token, stop strings and their length.
MOST_DRAWS = 128
MOST_LOGPROBS = 20
MOST_STOPS = 16
LONGEST_STOP = 1024
# Lower temperatures are greedy up to rounding; far lower, logit / temperature overflows FP32.
_COLDEST = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters. `top_k` 0 and `top_p` 1 keep all tokens; `logprobs` counts alternatives per token, or None."""

    max_tokens: int = 16
    temperature: float = 1.0  # 0 (or below 1e-6) is greedy
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # 0: only the sampled token's

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
            raise RequestError("top_p 0 leaves no token to sample.", hint="Use temperature 0 for the likeliest token.")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, whatever the seed."""
        return self.temperature < _COLDEST

    @property
    def filtered(self) -> bool:
        """Whether some tokens are excluded before sampling."""
        return not self.greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


def _within(name: str, number: float, low: float, high: float) -> None:
    # NaN fails this comparison.
    if not low <= number <= high:
        raise RequestError(f"{name} is {number}.", hint=f"Give {name} between {low} and {high}.")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A sampled token's log probability, and the most likely alternatives, best first."""

    token_id: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class AnswerDelta:
    """The new part of one answer of a request: from the engine tokens alone, from `Answer.take` with their text."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)  # one per token, or none at all
    finish_reason: FinishReason | None = None
    time_s: float = 0.0  # when the engine had it


@dataclass(frozen=True, slots=True)
class Output:
    """One finished answer. `text` is empty if the model has no tokenizer."""

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    prompt_token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
