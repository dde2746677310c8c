"""Eight-bit weights: how far they are from what they stand for, and what is computed with them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tonnage.serve.config import Weights
from tonnage.serve.models import linear
from tonnage.serve.models.linear import EIGHT_BIT, Dense, EightBit, quantise


def _quantised(source: torch.Tensor, kind: Weights) -> tuple[torch.Tensor, torch.Tensor]:
    weight, scales = torch.empty(source.shape, dtype=EIGHT_BIT[kind]), torch.empty(source.shape[:-1])
    quantise(source, weight, scales)
    return weight, scales


@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 9),
    columns=st.integers(1, 40),
    kind=st.sampled_from(list(EIGHT_BIT)),
)
def test_each_number_is_as_near_as_its_format_allows(seed: int, rows: int, columns: int, kind: Weights) -> None:
    generator = torch.Generator().manual_seed(seed)
    source = torch.randn(rows, columns, generator=generator) * torch.logspace(-6, 3, rows)[:, None]
    weight, scales = _quantised(source, kind)
    error = (weight.float() * scales[:, None] - source).abs()
    largest = source.abs().amax(1, keepdim=True)
    # INT8: half a step of 127. FP8: half of a three-bit mantissa's last place, and half a step of the smallest numbers.
    allowed = largest / 254 if kind == "int8" else source.abs() / 16 + largest / 448 * 2**-10
    assert (error <= allowed * (1 + 1e-5)).all()


@pytest.mark.parametrize("kind", EIGHT_BIT)
def test_a_row_of_zeros_stays_zero(kind: Weights) -> None:
    weight, scales = _quantised(torch.zeros(2, 8), kind)
    assert (weight.float() * scales[:, None]).eq(0).all()


@pytest.mark.parametrize("kind", EIGHT_BIT)
def test_stacks_and_long_matrices_are_quantised_row_by_row(kind: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    source = torch.randn(3, 7, 8, dtype=torch.bfloat16)
    whole = _quantised(source, kind)
    monkeypatch.setattr(linear, "_AT_ONCE", 32)
    for pieces, expected in zip(_quantised(source, kind), whole, strict=True):
        assert torch.equal(pieces.float(), expected.float())
    alone = _quantised(source[1], kind)
    assert torch.equal(alone[0].float(), whole[0][1].float()) and torch.equal(alone[1], whole[1][1])


@pytest.mark.parametrize("kind", EIGHT_BIT)
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_that_of_the_numbers_it_stands_for(kind: Weights, biased: bool) -> None:
    bias = torch.randn(12) if biased else None
    weight, scales = _quantised(torch.randn(12, 16), kind)
    rows = torch.randn(5, 16)
    expected = Dense(weight.float() * scales[:, None], bias)(rows)
    torch.testing.assert_close(EightBit(weight, scales, bias)(rows), expected)
