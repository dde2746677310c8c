"""Merged weights: where each tensor of a checkpoint goes, and how many bytes they are."""

import pytest
import torch

from serve.models.tiny import SERVED
from tonnage.models.config import from_config
from tonnage.models.presets import preset_config
from tonnage.serve.models.architecture import architecture_of
from tonnage.serve.models.decoder import Decoder
from tonnage.serve.models.linear import Dense, EightBit
from tonnage.serve.models.weights import Builder

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
