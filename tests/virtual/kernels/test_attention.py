"""Attention against rows measured on an H200 with torch 2.11."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from tonnage.virtual.kernels.attention import (
    backward_tile,
    cudnn_forward_bytes,
    efficient_workspace_bytes,
    flash_splits,
)

pytestmark = pytest.mark.usefixtures("gpu")
Events = Callable[[Callable[[], object]], str]
BF16 = torch.bfloat16
H200 = (9, 0)


def _qkv(
    *shape: int, keys: tuple[int, ...] | None = None, dtype: torch.dtype = BF16, grad: bool = True
) -> list[torch.Tensor]:
    return [
        torch.empty(s, dtype=dtype, device="cuda", requires_grad=grad) for s in (shape, keys or shape, keys or shape)
    ]


def _backward(events: Events, out: torch.Tensor, inputs: list[torch.Tensor]) -> str:
    grad = torch.ones_like(out)
    return events(lambda: torch.autograd.grad(out, inputs, grad))


def test_flash_keeps_statistics_and_random_state(events: Events) -> None:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        inputs = _qkv(2, 4, 64, 64)
        assert events(lambda: F.scaled_dot_product_attention(*inputs)) == "+65536 +2048 +16 +8"


def test_flash_splits_long_keys_of_few_heads(events: Events) -> None:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        inputs = _qkv(1, 12, 1024, 64)
        made = events(lambda: F.scaled_dot_product_attention(*inputs))
    assert made == "+1572864 +49152 +196608 +12582912 +16 +8 -2 -3"


def test_flash_backward_of_shared_keys_expands_them(events: Events) -> None:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        inputs = _qkv(2, 8, 256, 64, keys=(2, 2, 256, 64))
        out = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
        made = _backward(events, out, inputs)
    expected = "+524288 +524288 +524288 +131072 +131072 +16384 +1048576 +524288 +524288 -8 -7 -6 -5 -1 -0"
    assert made.startswith(expected)


def test_efficient_pads_its_statistics(events: Events) -> None:
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        inputs = _qkv(2, 8, 100, 64)
        assert events(lambda: F.scaled_dot_product_attention(*inputs)) == "+204800 +8192"


def test_efficient_accumulates_wide_heads_in_float(events: Events) -> None:
    inputs = _qkv(2, 8, 64, 512, dtype=torch.float16)
    assert events(lambda: F.scaled_dot_product_attention(*inputs)) == "+1048576 +4096 +2097152 -2"
    out = F.scaled_dot_product_attention(*inputs)
    made = _backward(events, out, inputs)
    assert made.startswith("+1048576 +1048576 +1048576 +4096 +8390656 -3 -4")


def test_cudnn_comes_first_on_hopper(events: Events) -> None:
    inputs = _qkv(2, 8, 100, 64)
    assert events(lambda: F.scaled_dot_product_attention(*inputs)) == "+8 +8 +204800 +6400 +256 -4"
    out = F.scaled_dot_product_attention(*inputs)
    assert _backward(events, out, inputs).startswith("+204800 +204800 +204800 +416256 -3")


def test_cudnn_without_gradients_keeps_no_statistics(events: Events) -> None:
    inputs = _qkv(2, 8, 1, 128, keys=(2, 2, 777, 128), grad=False)
    made = events(lambda: F.scaled_dot_product_attention(*inputs, enable_gqa=True))
    assert made == "+8 +8 +4096 +33408 -3 -0 -1"


@pytest.mark.parametrize(
    ("heads", "keys", "size"),
    [(16, 128, 0), (16, 1000, 17024), (16, 4096, 67712), (128, 4100, 270464), (256, 544, 270464), (512, 575, 0)],
)
def test_cudnn_splits_a_single_query(heads: int, keys: int, size: int) -> None:
    assert cudnn_forward_bytes(heads, 1, keys, 64, 132) == size


def test_other_widths_go_elsewhere(events: Events) -> None:
    inputs = _qkv(2, 8, 300, 65, dtype=torch.float16)
    made = events(lambda: F.scaled_dot_product_attention(*inputs))
    assert made == "+691200 +691200 +691200 +691200 +19200 +57600 +5529600 +16 +8 -5 -6", "flash, on padded copies"


def test_float_goes_to_the_efficient_kernels(events: Events) -> None:
    inputs = _qkv(2, 8, 128, 64, dtype=torch.float32)
    assert events(lambda: F.scaled_dot_product_attention(*inputs)) == "+524288 +8192"


def test_no_backend_is_an_error() -> None:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), pytest.raises(RuntimeError, match="No available kernel"):
        F.scaled_dot_product_attention(*_qkv(2, 8, 128, 64, dtype=torch.float32))


@given(st.integers(1, 500), st.integers(1, 300), st.integers(1, 400))
def test_splits_are_within_the_blocks_of_keys(blocks: int, slots: int, key_blocks: int) -> None:
    assert 1 <= flash_splits(blocks, slots, key_blocks) <= min(128, max(key_blocks, 1))


@pytest.mark.parametrize(
    ("dtype", "width", "capability", "tile"),
    [
        (BF16, 64, H200, (64, 64, False)), (BF16, 128, H200, (128, 128, False)), (BF16, 256, H200, (128, 64, True)),
        (torch.float32, 128, H200, (128, 64, False)), (torch.float16, 80, (8, 9), (128, 64, False)),
        (torch.float16, 128, (8, 6), (64, 64, True)),
    ],
)  # fmt: skip
def test_tiles(dtype: torch.dtype, width: int, capability: tuple[int, int], tile: tuple[Any, ...]) -> None:
    assert backward_tile(dtype, width, capability, dropout=False) == tile


def test_the_workspace_of_the_backward() -> None:
    assert efficient_workspace_bytes(BF16, (2, 8, 100, 100), (64, 64), H200, dropout=False) == 524800
