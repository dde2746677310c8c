"""Sample rows that need more than plain sampling: filtered tokens, or log probabilities.

They are sampled again from copies of their logits, a bounded number of rows at a time. Log probabilities are those
of the model's own logits, before temperature and filters. This module does not know the step.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tonnage.budget.serving.own_engine import FILTERED_ROWS
from tonnage.serve.kernels import logit_threshold, sample
from tonnage.serve.sampling import MOST_LOGPROBS, Sampling, TokenLogprob


@dataclass(slots=True)
class Logprobs:
    """Log probabilities of some rows in transit to the host: of the sampled token, and of the most likely ones."""

    wanted: list[Sampling]
    tokens: Tensor
    sampled: Tensor
    numbers: Tensor
    ids: Tensor

    def read(self) -> Iterator[TokenLogprob | None]:
        """Yield one per row, None if not requested; the copy must have arrived."""
        rows = zip(self.tokens.tolist(), self.sampled.tolist(), self.ids.tolist(), self.numbers.tolist(), strict=True)
        for sampling, (token, sampled, ids, numbers) in zip(self.wanted, rows, strict=True):
            count = sampling.logprobs
            best = tuple(zip(ids[:count], numbers[:count], strict=True)) if count else ()
            yield None if count is None else TokenLogprob(token, sampled, best)


def sample_special(
    logits: Tensor, rows: Tensor, wanted: list[Sampling], temperatures: Tensor, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Logprobs | None]:
    """Return tokens of these rows of the logits, and their log probabilities if any row requests them."""
    scored = any(sampling.logprobs is not None for sampling in wanted)
    sampled: list[tuple[Tensor, ...]] = []
    for first in range(0, len(wanted), FILTERED_ROWS):
        part = slice(first, first + FILTERED_ROWS)
        own = logits.index_select(0, rows[part])
        kept = filtered(own, wanted[part], temperatures[part])
        tokens = sample(kept, temperatures[part], seeds[part], positions[part])
        if not scored:
            sampled.append((tokens,))
            continue
        numbers = own.float().log_softmax(dim=-1)
        best = numbers.topk(min(MOST_LOGPROBS, own.shape[-1]), dim=-1)
        sampled.append((tokens, numbers.gather(1, tokens.unsqueeze(1)).squeeze(1), best.values, best.indices))
    tokens, *scores = (torch.cat(parts) for parts in zip(*sampled, strict=True))
    return tokens, Logprobs(wanted, to_host(tokens), *map(to_host, scores)) if scored else None


def filtered(logits: Tensor, wanted: list[Sampling], temperatures: Tensor) -> Tensor:
    """Return the logits with −inf for tokens excluded by top-k, top-p or min-p."""
    if not any(sampling.filtered for sampling in wanted):
        return logits
    ruled = [sampling if sampling.filtered else Sampling() for sampling in wanted]
    vocabulary = logits.shape[-1]
    rules = torch.tensor(
        [[one.top_k or vocabulary for one in ruled], [one.top_p for one in ruled], [one.min_p for one in ruled]],
        dtype=torch.float32,
        pin_memory=logits.is_cuda,
    )
    kept_from = logit_threshold(logits, temperatures, *rules.to(logits.device, non_blocking=True))
    return logits.masked_fill(logits < kept_from.unsqueeze(1), -torch.inf)


def to_host(values: Tensor) -> Tensor:
    """Return a copy on the host without waiting for the device."""
    if values.device.type != "cuda":
        return values
    return torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
