"""What filters rule out is what transformers rules out, and log probabilities are the model's own."""

import pytest
import torch

import torchvision_names  # noqa: F401

# isort: split
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tonnage.serve.model_runner.sampler import filtered, sample_special
from tonnage.serve.sampling import Sampling

WISHES = [
    Sampling(top_k=5, temperature=0.7),
    Sampling(top_p=0.6, temperature=1.3),
    Sampling(min_p=0.2),
    Sampling(top_k=20, top_p=0.5, min_p=0.1, temperature=0.9),
    Sampling(top_k=1),
    Sampling(top_k=1000),
    Sampling(top_p=1e-6),
    Sampling(temperature=0, top_k=3),
    Sampling(),
]


def logits_of(rows: int, vocabulary: int = 211) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(rows)) * 3


def reference(logits: torch.Tensor, wish: Sampling) -> torch.Tensor:
    """Which tokens transformers keeps."""
    if wish.temperature == 0:
        return torch.ones_like(logits, dtype=torch.bool)
    scores, ids = logits[None], torch.zeros(1, 1, dtype=torch.long)
    chain = [TemperatureLogitsWarper(wish.temperature)] if wish.temperature != 1 else []
    chain += [TopKLogitsWarper(wish.top_k)] if wish.top_k else []
    chain += [TopPLogitsWarper(wish.top_p)] if wish.top_p < 1 else []
    chain += [MinPLogitsWarper(wish.min_p)] if wish.min_p else []
    for warper in chain:
        scores = warper(ids, scores)
    return scores[0] > -torch.inf


def temperatures_of(wishes: list[Sampling]) -> torch.Tensor:
    return torch.tensor([wish.temperature for wish in wishes])


def test_filters_keep_what_transformers_keeps() -> None:
    logits = logits_of(len(WISHES))
    kept = filtered(logits, WISHES, temperatures_of(WISHES))
    for row, wish in enumerate(WISHES):
        assert torch.equal(kept[row] > -torch.inf, reference(logits[row], wish)), wish
        assert torch.equal(kept[row][kept[row] > -torch.inf], logits[row][kept[row] > -torch.inf])


def test_nothing_is_touched_where_nothing_is_filtered() -> None:
    logits, wishes = logits_of(2), [Sampling(), Sampling(temperature=0)]
    assert filtered(logits, wishes, temperatures_of(wishes)) is logits


@pytest.mark.parametrize("count", [1, 9, 70])
def test_draws_lie_within_the_filter_and_have_the_models_own_logprobs(count: int) -> None:
    """More rows than are sorted at once, too; taken from anywhere among the logits."""
    logits = logits_of(count + 5)
    rows = torch.randperm(count + 5, generator=torch.Generator().manual_seed(1))[:count]
    wishes = [Sampling(top_k=1 + row % 4, logprobs=row % 3 if row % 5 else None) for row in range(count)]
    seeds, positions = torch.arange(count), torch.arange(count) * 7
    tokens, scores = sample_special(logits, rows, wishes, torch.ones(count), seeds, positions)
    for row, wish in enumerate(wishes):
        assert int(tokens[row]) in logits[rows[row]].topk(wish.top_k).indices
    if count == 1:
        assert scores is None
        return
    assert scores is not None
    expected = logits.log_softmax(-1)
    for row, (wish, found) in enumerate(zip(wishes, scores.read(), strict=True)):
        assert (found is None) == (wish.logprobs is None)
        if found is not None:
            line = expected[rows[row]]
            assert found.token_id == int(tokens[row])
            assert found.logprob == pytest.approx(float(line[found.token_id]), abs=1e-5)
            best = line.topk(wish.logprobs or 0)
            assert [token for token, _ in found.alternatives] == best.indices.tolist()
            assert [number for _, number in found.alternatives] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_a_row_draws_the_same_in_any_company() -> None:
    logits, wish = logits_of(40), Sampling(top_p=0.9)
    seeds, positions = torch.arange(40) + 5, torch.arange(40)
    together, _ = sample_special(logits, torch.arange(40), [wish] * 40, torch.ones(40), seeds, positions)
    for row in (0, 13, 39):
        alone, _ = sample_special(
            logits, torch.tensor([row]), [wish], torch.ones(1), seeds[row : row + 1], positions[row : row + 1]
        )
        assert int(alone[0]) == int(together[row])
