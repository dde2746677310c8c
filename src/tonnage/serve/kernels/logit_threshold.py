"""Find the lowest logit that passes top-k, top-p and min-p: by sorting, or bisecting counts in about thirty reads."""

import torch
from torch import Tensor

from tonnage.serve.kernels.common import jit, tl

_ROWS = 32  # rows sorted at once: sorting takes several times the memory of the logits
_BLOCK = 4096


def logit_threshold_reference(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Return the lowest logit kept in each row of FP32 logits [S, V]; the best always is.

    `top_k` ≥ V, `top_p` ≥ 1 and `min_p` = 0 keep all. Probabilities are at the row's temperature (1 if it is 0),
    over the tokens that top-k keeps.
    """
    rules = (temperatures, top_k, top_p, min_p)
    rows = zip(logits.split(_ROWS), *(rule.unsqueeze(1).split(_ROWS) for rule in rules), strict=True)
    ranks = torch.arange(logits.shape[-1], device=logits.device)
    lowest = [logits.new_empty(0)]
    for some, heat, most, mass, least in rows if len(logits) else ():
        best = some.sort(dim=-1, descending=True).values
        scale = torch.where(heat > 0, heat, 1.0)
        shares = (best / scale).masked_fill(ranks >= most, -torch.inf).softmax(dim=-1)
        # Sums of probabilities are rounded, and may reach 1 before the last.
        before = shares.cumsum(dim=-1) - shares
        kept = ((before < mass) | (mass >= 1)) & (shares >= least * shares[:, :1]) & (shares > 0)
        kept[:, 0] = True
        lowest.append(best.gather(1, kept.sum(dim=-1, keepdim=True) - 1).squeeze(1))
    return torch.cat(lowest)


def logit_threshold_triton(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Like `logit_threshold_reference`; probabilities that are 0 in FP32 may stay."""
    rows, vocabulary = logits.shape
    threshold = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        _least_kernel[(rows,)](
            logits, temperatures, top_k, top_p, min_p, threshold, STRIDE=logits.stride(0), VOCABULARY=vocabulary,
            BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
    return threshold


@jit
def _in_order(bits):
    """Map a float's bits to an integer in the order of floats, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def _rank_of(value):
    return _in_order(value.to(tl.int32, bitcast=True)).to(tl.int64)


@jit
def _value_of(rank):
    return _in_order(rank.to(tl.int32)).to(tl.float32, bitcast=True)


@jit
def _above(line, value, best, scale, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, WEIGHED: tl.constexpr):
    """Count the logits above a value, or sum their weights relative to the best."""
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, VOCABULARY, BLOCK):
        lanes = first + tl.arange(0, BLOCK)
        logits = tl.load(line + lanes, mask=lanes < VOCABULARY, other=float("-inf"))
        each = tl.exp2((logits - best) * scale) if WEIGHED else 1.0
        total += tl.where(logits > value, each, 0.0)
    return tl.sum(total, 0)


@jit
def _least_above(
    line, low, high, most, best, scale, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr, WEIGHED: tl.constexpr
):
    """Return the lowest value in the range with less than `most` above it; the highest always qualifies."""
    rank = _rank_of(low)
    end = _rank_of(high)
    while rank < end:
        middle = rank + (end - rank) // 2
        fewer = _above(line, _value_of(middle), best, scale, VOCABULARY, BLOCK, WEIGHED) < most
        end = tl.where(fewer, middle, end)
        rank = tl.where(fewer, rank, middle + 1)
    return _value_of(rank)


@jit(do_not_specialize_on_alignment=["temperatures", "top_k", "top_p", "min_p", "threshold"])
def _least_kernel(
    logits, temperatures, top_k, top_p, min_p, threshold, STRIDE: tl.constexpr, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * STRIDE
    heat = tl.load(temperatures + row)
    scale = 1.4426950408889634 / tl.where(heat > 0, heat, 1.0)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, VOCABULARY, BLOCK):
        lanes = first + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(line + lanes, mask=lanes < VOCABULARY, other=float("-inf")))
    best = tl.max(largest, 0)
    bound = best - float("inf")
    count = tl.load(top_k + row)
    if count < VOCABULARY:
        bound = _least_above(line, bound, best, count, best, scale, VOCABULARY, BLOCK, False)
    share = tl.load(top_p + row)
    if share < 1:
        # Of logits equal to the last that top-k keeps, count only as many as it keeps.
        weight = _above(line, bound, best, scale, VOCABULARY, BLOCK, True)
        more = tl.minimum(count, VOCABULARY) - _above(line, bound, best, scale, VOCABULARY, BLOCK, False)
        weight += more * tl.exp2((bound - best) * scale)
        # Logits weighing less than 2⁻⁵⁸ of the best are negligible, however many.
        low = tl.maximum(bound, best - 58 / scale)
        bound = _least_above(line, low, best, share * weight, best, scale, VOCABULARY, BLOCK, True)
    bound = tl.maximum(bound, best + tl.log2(tl.load(min_p + row)) / scale)
    tl.store(threshold + row, tl.minimum(bound, best))
