"""How reductions are split over a card; numbers measured on an H200 (132 multiprocessors) with torch 2.11."""

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from tonnage.virtual.kernels.reductions import Element, WarpLimits, make_loop, staging_bytes

H200 = WarpLimits(132, 2048)
FLOAT = Element(4, 4)
SIZES = st.integers(1, 70)


def test_a_row_of_a_million_floats_meets_in_one_buffer() -> None:
    loop = make_loop((1_000_003,), (0,), (4,), 0)
    assert staging_bytes(loop, FLOAT, H200) == ((492, 4),)


def test_small_reductions_need_nothing() -> None:
    assert staging_bytes(make_loop((1000,), (0,), (4,), 0), FLOAT, H200) == ((0, 0),)


def test_more_multiprocessors_mean_more_partial_results() -> None:
    loop = make_loop((16_777_216,), (0,), (4,), 0)
    (small, _), (large, _) = (staging_bytes(loop, FLOAT, WarpLimits(n, 2048))[0] for n in (20, 132))
    assert small < large


def test_beyond_32_bits_there_are_several_launches() -> None:
    loop = make_loop((1 << 30,), (0,), (4,), 0)
    assert len(staging_bytes(loop, FLOAT, H200)) == 2


def test_contiguous_dimensions_are_one() -> None:
    loop = make_loop((8, 128, 768), (0, 0, 0), (128 * 768 * 4, 768 * 4, 4), 0)
    assert (loop.shape, loop.input) == ((8 * 128 * 768,), (4,))


@given(st.tuples(SIZES, SIZES, SIZES), st.sets(st.integers(0, 2)), st.permutations(range(3)))
def test_no_element_is_lost_however_it_lies(sizes: tuple[int, int, int], reduced: set[int], order: list[int]) -> None:
    strides, step = [0, 0, 0], 4
    for d in order:
        strides[d], step = step, step * sizes[d]
    kept = [d for d in range(3) if d not in reduced]
    output, step = [0, 0, 0], 4
    for d in reversed(kept):
        output[d], step = step, step * sizes[d]
    loop = make_loop(sizes, tuple(output), tuple(strides), 0)
    assert prod(loop.shape) == sizes[0] * sizes[1] * sizes[2]
    expected = 1
    for d in kept:
        expected *= sizes[d]
    assert prod(size for size, stride in zip(loop.shape, loop.output, strict=True) if stride) == expected
