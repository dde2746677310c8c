"""The model of the simulation: small, deterministic, and as unforgiving as attention.

What lies in the cache for a position is its *key*: a hash of the tenant and of every token up to there. One wrong token
anywhere before, or another tenant's block, and the key is another. The next token is a hash of the key and the draw. So what
a sequence must answer is known before it starts, and any lost, doubled or foreign token shows.
"""

from functools import cache
from typing import NamedTuple

VOCABULARY = 6
END, STOP = 0, 1  # the end-of-sequence token, and one at which some requests stop
GARBAGE_KEY = 0
GARBAGE_TOKEN = -1


class Story(NamedTuple):
    """A sequence as it must go: tokens and their keys, past an early end, up to the last that may be drawn."""

    tokens: list[int]
    keys: list[int]
    prompt_length: int
    length: int  # tokens with which it ends of itself
    reason: str

    def __str__(self) -> str:
        return f"{self.tokens[: self.prompt_length]} → {self.tokens[self.prompt_length : self.length]} ({self.reason})"


@cache
def root(salt: str) -> int:
    """The key before the first token: the tenant's own."""
    return hash((int.from_bytes(salt.encode()), 7))


def key_after(before: int, token: int) -> int:
    """The key of a token that follows the key `before`."""
    return hash((before, token))


def token_after(key: int, sample_index: int) -> int:
    """What the model says next."""
    return hash((key, sample_index)) % VOCABULARY


def tell(prompt: list[int], most: int, *, salt: str, sample_index: int, ends: frozenset[int]) -> Story:
    """The story of a prompt with at most `most` tokens drawn after it; it ends early at a token of `ends`."""
    tokens, keys, before = list(prompt), [], root(salt)
    for position in range(len(prompt) + most):
        if position == len(tokens):
            tokens.append(token_after(before, sample_index))
        before = key_after(before, tokens[position])
        keys.append(before)
    sampled = tokens[len(prompt) :]
    for count, token in enumerate(sampled, start=1):
        if token in ends:
            return Story(tokens, keys, len(prompt), len(prompt) + count, "stop")
    return Story(tokens, keys, len(prompt), len(tokens), "length")
