"""Experts: every token reaches those that it chose, with its weights for them, however the choice falls."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.serve.config import Weights
from tonnage.serve.kernels import silu_mul
from tonnage.serve.models.experts import Experts, ExpertStack
from tonnage.serve.models.weights import EIGHT_BIT, quantise

HIDDEN, WIDTH = 16, 8


def _stack(experts: int, rows: int, columns: int, kind: Weights | None) -> tuple[ExpertStack, torch.Tensor]:
    """And what it stands for."""
    source = torch.randn(experts, rows, columns)
    if kind is None:
        return ExpertStack(source, None, torch.float32), source
    weight, scales = torch.empty(source.shape, dtype=EIGHT_BIT[kind]), torch.empty(experts, rows)
    quantise(source, weight, scales)
    return ExpertStack(weight, scales, torch.float32), weight.float() * scales[..., None]


@settings(deadline=None, max_examples=40)
@given(
    tokens=st.integers(1, 20),
    experts=st.integers(1, 9),
    data=st.data(),
    normalised=st.booleans(),
    kind=st.sampled_from([None, "int8", "fp8"]),
)
def test_the_answer_is_the_weighted_sum_over_chosen_experts(
    tokens: int, experts: int, data: st.DataObject, normalised: bool, kind: Weights | None
) -> None:
    per_token = data.draw(st.integers(1, experts))
    torch.manual_seed(tokens * 100 + experts)
    router, hidden = torch.randn(experts, HIDDEN), torch.randn(tokens, HIDDEN)
    gate_up, plain_gate_up = _stack(experts, 2 * WIDTH, HIDDEN, kind)
    down, plain_down = _stack(experts, HIDDEN, WIDTH, kind)
    made = Experts(router, gate_up, down, silu_mul, per_token=per_token, normalised=normalised)
    everyone = torch.stack([silu_mul(hidden @ up.T) @ own.T for up, own in zip(plain_gate_up, plain_down, strict=True)])
    weights, chosen = (hidden @ router.T).softmax(-1).topk(per_token)
    weights = weights / weights.sum(-1, keepdim=True) if normalised else weights
    expected = sum(weights[:, k, None] * everyone[chosen[:, k], torch.arange(tokens)] for k in range(per_token))
    torch.testing.assert_close(made(hidden), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("ends", [[0, 3, 3, 8], [8, 8, 8, 8], [0, 0, 0, 8], [2, 4, 6, 8]])
def test_the_grouped_product_is_that_of_experts_in_turn(ends: list[int]) -> None:
    rows, weight = torch.randn(8, HIDDEN, dtype=torch.bfloat16), torch.randn(4, WIDTH, HIDDEN, dtype=torch.bfloat16)
    borders = torch.tensor(ends, dtype=torch.int32)
    stack = ExpertStack(weight, None, torch.bfloat16)
    in_turn, stack.grouped = stack(rows, borders, borders), True
    torch.testing.assert_close(stack(rows, borders, borders), in_turn, atol=0.1, rtol=0.02)
