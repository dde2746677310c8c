"""Merged weights: where each tensor of a checkpoint goes, and how many bytes they are."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.models.tiny import SERVED
from tonnage.models.config import from_config
from tonnage.models.presets import preset_config
from tonnage.serve.config import Weights
from tonnage.serve.kernels import silu_mul
from tonnage.serve.models import weights
from tonnage.serve.models.architecture import architecture_of
from tonnage.serve.models.decoder import Decoder
from tonnage.serve.models.weights import EIGHT_BIT, Builder, Dense, EightBit, Experts, ExpertStack, quantise

CPU = torch.device("cpu")


def test_parts_lie_below_each_other_with_their_biases() -> None:
    build = Builder(CPU, torch.float32, None)
    made = build.matrix("a.", [("q", 2), ("k", 1)], 3, bias=True)
    for number, (name, piece) in enumerate(build.pieces.items()):
        piece.fill(torch.full(piece.weight.shape, float(number)))
        assert name == ("a.q.weight", "a.q.bias", "a.k.weight", "a.k.bias")[number]
    assert isinstance(made, Dense) and made.bias is not None
    assert made.weight.tolist() == [[0.0] * 3, [0.0] * 3, [2.0] * 3] and made.bias.tolist() == [1, 1, 3]
    assert build.bytes == 4 * (9 + 3)


@pytest.mark.parametrize("weights", [None, "int8"])
def test_a_stack_filled_at_once_is_the_one_filled_by_expert(weights: str | None) -> None:
    source = torch.randn(4, 5, 6)
    stacks = []
    for at_once in (True, False):
        build = Builder(CPU, torch.float32, weights)  # type: ignore[arg-type]
        stacks.append(build.stack("e.", "gate_up", [("gate", 3), ("up", 2)], 6, 4))
        if at_once:
            build.fused["e.gate_up"].fill(source)
            assert set(build.fused["e.gate_up"].holds) == set(build.pieces)
            continue
        for expert in range(4):
            build.pieces[f"e.{expert}.gate.weight"].fill(source[expert, :3])
            build.pieces[f"e.{expert}.up.weight"].fill(source[expert, 3:])
    assert torch.equal(stacks[0].weight, stacks[1].weight)
    if stacks[0].scales is not None:
        assert torch.equal(stacks[0].scales, stacks[1].scales)


def test_eight_bits_are_counted_with_their_scales() -> None:
    build = Builder(CPU, torch.bfloat16, "fp8")
    assert isinstance(build.matrix("", [("o", 8)], 16, bias=True), EightBit)
    assert build.bytes == 8 * 16 + 8 * 4 + 8 * 2
    assert build.tensor("norm", 16).dtype == torch.bfloat16


@pytest.mark.parametrize("preset", SERVED)
def test_a_decoder_has_the_parameters_that_the_planner_counts(preset: str) -> None:
    config = preset_config(preset)
    build = Builder(torch.device("meta"), torch.bfloat16, None)
    decoder = Decoder(architecture_of(config), build, positions=8)
    counted = sum(piece.weight.numel() for piece in build.pieces.values())
    assert decoder.weight_bytes == 2 * counted
    if config["model_type"] != "gemma3":  # which is counted with its eyes
        assert counted == from_config(config).parameters


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
    monkeypatch.setattr(weights, "_AT_ONCE", 32)
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


HIDDEN, WIDTH = 16, 8


def _stack(experts: int, rows: int, columns: int, kind: Weights | None) -> tuple[ExpertStack, torch.Tensor]:
    """And what it stands for."""
    source = torch.randn(experts, rows, columns)
    if kind is None:
        return ExpertStack(source, None, torch.float32), source
    weight, scales = torch.empty(source.shape, dtype=EIGHT_BIT[kind]), torch.empty(experts, rows)
    quantise(source, weight, scales)
    return ExpertStack(weight, scales, torch.float32), weight.float() * scales[..., None]


@settings(max_examples=40)
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
