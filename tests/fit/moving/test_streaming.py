"""Slots that hold the weights of a few blocks."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tonnage.fit.moving.host import ALIGNMENT_BYTES, PinnedSpace
from tonnage.fit.moving.streaming import BlockWeights, Nowhere, WeightStreamer, lay_out

CPU = torch.device("cpu")


def blocks_of(count: int) -> list[BlockWeights]:
    """Block i has a matrix and a vector full of i."""
    space, nowhere, blocks = PinnedSpace(CPU, 2**30), Nowhere(CPU), []
    for index in range(count):
        parameters = [nn.Parameter(torch.full(shape, float(index))) for shape in ((3, 5), (7,))]
        blocks.append(BlockWeights(parameters, space, nowhere))
        blocks[-1].leave()
    return blocks


def test_places_are_aligned_and_apart() -> None:
    places, byte_count = lay_out(
        [nn.Parameter(torch.zeros(n, dtype=d)) for n, d in ((3, torch.half), (5000, torch.float))]
    )
    assert [place.start for place in places] == [0, ALIGNMENT_BYTES]
    assert byte_count == ALIGNMENT_BYTES + 5 * ALIGNMENT_BYTES


def test_a_transposed_parameter_keeps_its_strides() -> None:
    parameter = nn.Parameter(torch.arange(6.0).view(2, 3).t().clone(memory_format=torch.preserve_format))
    expected, stride = parameter.detach().clone(), parameter.stride()
    weights = BlockWeights([parameter], PinnedSpace(CPU, 2**30), Nowhere(CPU))
    weights.leave()
    assert parameter.isnan().all()
    weights.return_for_good()
    assert torch.equal(parameter, expected)
    assert parameter.stride() == stride


@given(
    count=st.integers(1, 6),
    slots=st.integers(2, 4),
    uses=st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=30),
)
def test_a_block_that_is_brought_has_its_values_and_changes_come_home(
    count: int, slots: int, uses: list[tuple[int, bool]]
) -> None:
    blocks = blocks_of(count)
    streamer = WeightStreamer(blocks, CPU, slots=slots)
    expected = [float(index) for index in range(count)]
    for index, changes in ((index % count, changes) for index, changes in uses):
        streamer.bring(blocks[index])
        assert all((parameter == expected[index]).all() for parameter in blocks[index].places)
        assert sum(weights.slot is not None for weights in blocks) <= slots
        if changes:
            expected[index] += 10
            for parameter in blocks[index].places:
                with streamer.changing(parameter), torch.no_grad():
                    parameter.add_(10)
    streamer.close()
    assert all(parameter.isnan().all() for weights in blocks for parameter in weights.places)
    for weights, value in zip(blocks, expected, strict=True):
        weights.return_for_good()
        assert all((parameter == value).all() for parameter in weights.places)
