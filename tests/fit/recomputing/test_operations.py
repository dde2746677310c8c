"""What is counted for products and attention."""

import pytest
import torch

from tonnage.fit.recomputing.operations import matrix_operations

aten = torch.ops.aten


def test_a_product_counts_two_operations_for_each_pair() -> None:
    left, right = torch.empty(64, 32, device="meta"), torch.empty(32, 16, device="meta")
    assert matrix_operations(aten.mm.default, (left, right), {}, left @ right) == 2 * 64 * 32 * 16


def test_grouped_queries_are_counted_and_a_causal_mask_halves_them() -> None:
    query = torch.empty(2, 8, 128, 64, device="meta")
    key = value = torch.empty(2, 2, 128, 64, device="meta")
    flash = aten._scaled_dot_product_flash_attention.default
    whole = matrix_operations(flash, (query, key, value, 0.0, False), {}, None)
    assert whole == 4 * 2 * 8 * 128 * 128 * 64
    assert matrix_operations(flash, (query, key, value, 0.0, True), {}, None) == whole / 2


def test_backward_of_attention_takes_two_and_a_half_times_as_many() -> None:
    tensors = [torch.empty(2, 8, 128, 64, device="meta") for _ in range(4)]
    forward = matrix_operations(aten._scaled_dot_product_flash_attention.default, tuple(tensors[1:]), {}, None)
    backward = matrix_operations(aten._scaled_dot_product_flash_attention_backward.default, tuple(tensors), {}, None)
    assert backward == pytest.approx(2.5 * forward)


def test_anything_else_has_no_products() -> None:
    tensor = torch.empty(8, device="meta")
    assert matrix_operations(aten.add.Tensor, (tensor, tensor), {}, tensor) == 0
