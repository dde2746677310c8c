"""Sample a token from each row of logits: the most likely, or by the Gumbel trick, argmax(logit / temperature + noise).

The noise of a token depends only on (seed, position, token id), through counter-based Philox: it is the same in both
versions and in any batch. One Philox call serves four tokens a quarter block apart.
"""

import torch
from torch import Tensor

from tonnage.serve.kernels.common import jit, next_power_of_2, tl, wide

_QUARTER = 512  # tokens of a program that use the same Philox word; changing it changes the samples
_ROUNDS = 7  # the fewest Philox rounds that pass the usual randomness tests
_LOG2_E = 1.4426950408889634
_LOW = 0xFFFFFFFF


def sample_reference(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """Return token ids [S] sampled from logits [S, V]; greedy if a temperature is 0. Ties go to the first."""
    tokens = logits.argmax(-1)
    hot = temperatures.nonzero().squeeze(1)
    if len(hot):
        scores = logits[hot].to(wide(logits.dtype))
        noise = exponentials(seeds[hot], positions[hot], logits.shape[1]).to(scores.dtype).log2_()
        tokens[hot] = (scores * (_LOG2_E / temperatures[hot].to(scores.dtype)).unsqueeze(1) - noise).argmax(-1)
    return tokens if out is None else out.copy_(tokens)


def exponentials(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """Return samples of the exponential distribution divided by ln 2, FP32 [S, vocabulary]: −log2(1 − u) of uniform u."""
    u = random_words(seeds, positions, vocabulary).float().add_(0.5).mul_(2.0**-32)
    # For small u, 1 − u loses precision, and the smallest values decide the maximum.
    return torch.where(u < 2.0**-7, (u + u * u * (0.5 + u * (1 / 3))) * _LOG2_E, -(1 - u).log2())


def random_words(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """Return 32 random bits, as int64 [S, vocabulary], for each token at each row's seed and position."""
    tokens = torch.arange(vocabulary, device=seeds.device)
    block, place = tokens // (4 * _QUARTER), tokens % (4 * _QUARTER)
    last_block = min(_QUARTER, (vocabulary - 1) % (4 * _QUARTER) + 1)
    calls = (vocabulary - 1) // (4 * _QUARTER) * _QUARTER + last_block
    counters = torch.arange(calls, device=seeds.device).expand(len(seeds), -1)
    low, high = (word.unsqueeze(1).expand_as(counters) for word in (positions & _LOW, (positions >> 32) & _LOW))
    words = _philox((counters, low, high, torch.zeros_like(counters)), seeds.unsqueeze(1))
    return torch.cat(words, dim=1).index_select(1, place // _QUARTER * calls + block * _QUARTER + place % _QUARTER)


def _philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seeds: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute Philox 4×32 in int64; words are in [0, 2³²)."""
    c0, c1, c2, c3 = counter
    k0, k1 = seeds & _LOW, (seeds >> 32) & _LOW
    for _ in range(_ROUNDS):
        high_b, low_b = _multiply(0xCD9E8D57, c2)
        high_a, low_a = _multiply(0xD2511F53, c0)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return c0, c1, c2, c3


def _multiply(factor: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """Return the upper and lower 32 bits of a product, computed in halves since int64 is signed."""
    upper, lower = factor * (word >> 16), factor * (word & 0xFFFF)
    middle = (upper & 0xFFFF) << 16
    return (upper >> 16) + ((middle + lower) >> 32), (middle + lower) & _LOW


def sample_triton(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """Like `sample_reference`, in two launches: the best of each vocabulary block, then the best of those."""
    rows, vocabulary = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device) if out is None else out
    if rows == 0:
        return tokens
    blocks = -(-vocabulary // (4 * _QUARTER))
    best = torch.empty((rows, blocks), dtype=torch.float32, device=logits.device)
    where = torch.empty((rows, blocks), dtype=torch.int32, device=logits.device)
    _best_kernel[(blocks, rows)](
        logits, temperatures, seeds, positions, best, where, STRIDE=logits.stride(0), VOCABULARY=vocabulary,
        BLOCKS=blocks, QUARTER=_QUARTER, ROUNDS=_ROUNDS, num_warps=4,
    )  # fmt: skip
    _pick_kernel[(rows,)](best, where, tokens, BLOCKS=blocks, PADDED=next_power_of_2(blocks), num_warps=1)
    return tokens


@jit
def _noisy(logits, words, heat):
    u = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    small = (u + u * u * (0.5 + u * 0.3333333333333333)) * 1.4426950408889634
    exponential = tl.where(u < 0.0078125, small, -tl.log2(1.0 - u))
    return logits * (1.4426950408889634 / heat) - tl.log2(exponential)


@jit
def _better(best, where, score, token):
    """Keep the better elementwise; ties go to the earlier, smaller token."""
    return tl.maximum(best, score), tl.where(score > best, token, where)


@jit(do_not_specialize_on_alignment=["temperatures", "seeds", "positions"])
def _best_kernel(
    logits, temperatures, seeds, positions, best, where,
    STRIDE: tl.constexpr, VOCABULARY: tl.constexpr, BLOCKS: tl.constexpr, QUARTER: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    lanes = tl.arange(0, QUARTER)
    token_0 = block * (4 * QUARTER) + lanes
    token_1 = token_0 + QUARTER
    token_2 = token_1 + QUARTER
    token_3 = token_2 + QUARTER
    line = logits + row * STRIDE
    score_0 = tl.load(line + token_0, mask=token_0 < VOCABULARY, other=float("-inf")).to(tl.float32)
    score_1 = tl.load(line + token_1, mask=token_1 < VOCABULARY, other=float("-inf")).to(tl.float32)
    score_2 = tl.load(line + token_2, mask=token_2 < VOCABULARY, other=float("-inf")).to(tl.float32)
    score_3 = tl.load(line + token_3, mask=token_3 < VOCABULARY, other=float("-inf")).to(tl.float32)
    heat = tl.load(temperatures + row)
    if heat > 0:
        position = tl.load(positions + row).to(tl.int64)
        counter = block * QUARTER + lanes
        none = counter * 0
        low = none + (position & 0xFFFFFFFF).to(tl.int32)
        high = none + (position >> 32).to(tl.int32)
        word_0, word_1, word_2, word_3 = tl.philox(tl.load(seeds + row), counter, low, high, none, ROUNDS)
        score_0 = _noisy(score_0, word_0, heat)
        score_1 = _noisy(score_1, word_1, heat)
        score_2 = _noisy(score_2, word_2, heat)
        score_3 = _noisy(score_3, word_3, heat)
    score_0, token_0 = _better(score_0, token_0, score_1, token_1)
    score_2, token_2 = _better(score_2, token_2, score_3, token_3)
    score_0, token_0 = _better(score_0, token_0, score_2, token_2)
    largest = tl.max(score_0, 0)
    # Ties go to the smallest token; if all are NaN, to some token of the vocabulary.
    token = tl.min(tl.where(score_0 == largest, token_0, VOCABULARY - 1), 0)
    tl.store(best + row * BLOCKS + block, largest)
    tl.store(where + row * BLOCKS + block, tl.minimum(token, VOCABULARY - 1))


@jit
def _pick_kernel(best, where, tokens, BLOCKS: tl.constexpr, PADDED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, PADDED)
    inside = lanes < BLOCKS
    score = tl.load(best + row * BLOCKS + lanes, mask=inside, other=float("-inf"))
    token = tl.load(where + row * BLOCKS + lanes, mask=inside, other=2147483647)
    largest = tl.max(score, 0)
    picked = tl.min(tl.where(score == largest, token, 2147483647), 0)
    first = tl.min(token, 0)
    tl.store(tokens + row, tl.where(picked == 2147483647, first, picked).to(tl.int64))
