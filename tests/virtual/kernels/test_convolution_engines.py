"""The table of cuDNN's workspaces and what is concluded from it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.hardware import find_gpu
from tonnage.virtual.kernels.convolution_engines import (
    Convolution,
    ConvolutionCall,
    Workspace,
    measured_bytes,
    padded,
    recognised,
    search_bytes,
    takes_none,
    workspace_bytes,
)

RESNET = Convolution((64, 56, 56), (64, 64, 3, 3), (1, 1), (1, 1), (1, 1), 1)
DTYPES = ("float32", "bfloat16", "float16")
WAYS = ("forward", "backward_data", "backward_filter")


def test_what_was_measured_is_given_back() -> None:
    plan = ConvolutionCall("backward_filter", RESNET, 8, "float32", False)
    assert measured_bytes(plan) == workspace_bytes(plan) == 15057575


def test_a_batch_between_measured_ones_has_their_engine() -> None:
    plan = ConvolutionCall("backward_data", RESNET, 28, "float32", False)
    assert measured_bytes(plan) is None
    assert workspace_bytes(plan) == sum(plan.operand_bytes()) + 16


@pytest.mark.parametrize(
    ("card", "none"), [("rtx-3060", True), ("rtx-4060", True), ("v100-32", True), ("a100-40", False), ("h200", False)]
)
def test_float32_takes_no_workspace_where_tf32_is_no_faster(card: str, none: bool) -> None:
    rates = find_gpu(card).rates
    assert takes_none(ConvolutionCall("forward", RESNET, 8, "float32", False), rates) == none
    assert not takes_none(ConvolutionCall("forward", RESNET, 8, "bfloat16", False), rates)


def test_padding_goes_to_multiples_and_to_powers_of_two() -> None:
    assert [padded(c, 8) for c in (1, 8, 9)] == [8, 8, 16]
    assert [padded(c, 0) for c in (1, 48, 64, 168)] == [1, 64, 64, 256]


def test_the_search_takes_a_fourier_transform_s_workspace() -> None:
    assert max(search_bytes(ConvolutionCall("forward", RESNET, 8, "float32", False))) == 155860992
    assert max(search_bytes(ConvolutionCall("backward_filter", RESNET, 8, "float32", False))) == 144834560


def test_the_search_takes_copies_with_padded_channels_and_four_of_a_channel_that_is_alone() -> None:
    """As measured on an H200: the first layers of a ViT, and a layer of EfficientNet."""
    patches = Convolution((3, 224, 224), (384, 3, 16, 16), (16, 16), (0, 0), (1, 1), 1)
    assert max(search_bytes(ConvolutionCall("forward", patches, 128, "bfloat16", False))) == 123600912
    depthwise = Convolution((144, 128, 128), (144, 1, 3, 3), (1, 1), (1, 1), (1, 1), 144)
    measured = 75538960
    assert abs(max(search_bytes(ConvolutionCall("forward", depthwise, 2, "float16", False))) / measured - 1) < 0.001


engines = st.builds(
    Workspace,
    padding=st.sampled_from([1, 8]),
    copies=st.tuples(*[st.integers(0, 1)] * 3),
    weights_per_image=st.just(False),
    remainder_bytes=st.integers(0, 1023),
)


@given(engine=engines, batch=st.integers(8, 64), way=st.sampled_from(WAYS), dtype=st.sampled_from(DTYPES))
def test_an_engine_is_recognised_by_its_workspace(engine: Workspace, batch: int, way: str, dtype: str) -> None:
    plan = ConvolutionCall(way, RESNET, batch, dtype, False)  # type: ignore[arg-type]
    size = engine.workspace_bytes(plan)
    assert recognised(plan, size).workspace_bytes(plan) == size


@settings(max_examples=40)
@given(
    batch=st.integers(1, 96), inner=st.integers(1, 96), outer=st.integers(1, 96), side=st.integers(3, 40),
    kernel=st.sampled_from([1, 3]), way=st.sampled_from(WAYS), dtype=st.sampled_from(DTYPES), last=st.booleans(),
)  # fmt: skip
def test_every_convolution_gets_a_plausible_workspace(
    batch: int, inner: int, outer: int, side: int, kernel: int, way: str, dtype: str, last: bool
) -> None:
    layer = Convolution((inner, side, side), (outer, inner, kernel, kernel), (1, 1), (0, 0), (1, 1), 1)
    plan = ConvolutionCall(way, layer, batch, dtype, last)  # type: ignore[arg-type]
    operands = sum(plan.operand_bytes(8))
    assert 0 <= workspace_bytes(plan) <= 16 * operands + batch * plan.weight_elements * 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_sides_of_the_output(dtype: str) -> None:
    assert Convolution((3, 224, 224), (64, 3, 7, 7), (2, 2), (3, 3), (1, 1), 1).output_sides() == (112, 112)
