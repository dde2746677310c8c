"""Which matrix products Inductor pads, decided without a clock."""

import pytest
import torch

from tonnage.hardware import find_cuda_gpu
from tonnage.virtual.compiling.kernels import Operand, padding_pays

H200 = find_cuda_gpu("h200")


def decided(m: int, k: int, n: int, dtype: torch.dtype = torch.bfloat16, is_padded_already: bool = False) -> bool:
    aligned = 16 // dtype.itemsize
    more = {side: -side % aligned for side in (m, k, n)}
    left = Operand(m, k, more[m], more[k], False, is_padded_already)
    right = Operand(k, n, more[k], more[n], False, is_padded_already)
    return padding_pays(H200, dtype, 1, left, right)


@pytest.mark.parametrize(
    ("sides", "is_padded_already", "plain_ms", "padded_ms"),
    [
        ((8193, 1003, 1006), False, 0.133, 0.063),
        ((771, 16390, 3075), False, 0.650, 0.334),
        ((515, 260, 3074), False, 0.014, 0.021),
        ((3074, 25216, 3072), False, 0.571, 0.696),  # only the count of rows is odd
        ((256, 770, 16384), False, 0.036, 0.045),
        ((1001, 205, 1536), True, 0.0154, 0.0110),
        ((2052, 4101, 198), True, 0.0488, 0.0247),
    ],
)
def test_products_are_padded_as_an_h200_timed_them(
    sides: tuple[int, int, int], is_padded_already: bool, plain_ms: float, padded_ms: float
) -> None:
    assert decided(*sides, is_padded_already=is_padded_already) is (plain_ms > 1.1 * padded_ms)


def test_products_in_float32_are_not_padded() -> None:
    assert decided(8192, 4096, 4097)
    assert not decided(8192, 4096, 4097, torch.float32)
