"""Tokens drawn, plain: random numbers as Philox's authors have them, the right shares, and no influence of the batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.serve.kernels import sample
from tonnage.serve.kernels.sample import _philox, exponentials, random_words

MASK = 0xFFFFFFFF


def _philox_by_hand(counter: list[int], key: list[int], rounds: int) -> list[int]:
    for _ in range(rounds):
        left, right = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [right >> 32 ^ counter[1] ^ key[0], right & MASK, left >> 32 ^ counter[3] ^ key[1], left & MASK]
        key = [(key[0] + 0x9E3779B9) & MASK, (key[1] + 0xBB67AE85) & MASK]
    return counter


@settings(max_examples=50)
@given(st.lists(st.integers(0, MASK), min_size=4, max_size=4), st.integers(-(2**63), 2**63 - 1))
def test_philox(counter: list[int], seed: int) -> None:
    found = _philox(tuple(torch.tensor([word]) for word in counter), torch.tensor([seed]))  # type: ignore[arg-type]
    assert [int(word) for word in found] == _philox_by_hand(counter, [seed & MASK, seed >> 32 & MASK], 7)


def test_philox_by_hand_gives_the_published_words() -> None:
    """The known answers that come with Random123, for ten rounds."""
    assert _philox_by_hand([0] * 4, [0] * 2, 10) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_a_word_belongs_to_its_token() -> None:
    words = random_words(torch.tensor([5]), torch.tensor([2**40 + 9]), 5000)[0]
    for token in (0, 1, 511, 512, 2047, 2048, 4999):
        block, rest = divmod(token, 2048)
        counter = [block * 512 + rest % 512, 9, 2**8, 0]
        assert int(words[token]) == _philox_by_hand(counter, [5, 0], 7)[rest // 512]


def test_temperature_zero_takes_the_first_of_the_likeliest() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, -1.0], [float("-inf"), -5.0, -6.0, -5.0]])
    assert sample(logits, torch.zeros(2), torch.tensor([1, 2]), torch.tensor([0, 0])).tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_tokens_come_as_often_as_they_should(dtype: torch.dtype) -> None:
    count, temperature = 20_000, 0.7
    logits = torch.tensor([1.0, 0.0, -2.0, 0.5, float("-inf"), -9.0], dtype=dtype)
    wanted = (logits.double() / temperature).softmax(0)
    found = sample(
        logits.expand(count, -1), torch.full((count,), temperature), torch.full((count,), 3), torch.arange(count)
    )
    shares = found.bincount(minlength=6) / count
    assert ((shares - wanted).abs() <= 5 * (wanted * (1 - wanted) / count).sqrt() + 1e-9).all()
    assert shares[4] == 0


def test_what_others_draw_changes_nothing() -> None:
    torch.manual_seed(0)
    logits, seeds, positions = torch.randn(6, 300), torch.arange(6) * 7, torch.arange(6)
    temperatures = torch.tensor([0.5, 1.0, 0.0, 2.0, 1.0, 1.0])
    together = sample(logits, temperatures, seeds, positions)
    order = torch.tensor([3, 0, 5])
    assert (
        sample(logits[order], temperatures[order], seeds[order], positions[order]).tolist() == together[order].tolist()
    )


def test_seeds_and_positions_both_matter() -> None:
    logits, heat = torch.zeros(1, 4096), torch.ones(1)
    sampled = {
        int(sample(logits, heat, torch.tensor([seed]), torch.tensor([position])))
        for seed in range(4)
        for position in range(4)
    }
    assert len(sampled) > 12


def test_exponentials_have_the_mean_and_the_small_numbers_of_their_kind() -> None:
    found = (
        exponentials(torch.arange(50), torch.zeros(50, dtype=torch.int64), 100_000).double()
        * torch.tensor(2.0).log().double()
    )
    assert found.mean().item() == pytest.approx(1, abs=2e-3)
    assert found.min() > 0
    assert (found < 1e-5).double().mean().item() == pytest.approx(1e-5, rel=0.6)
