"""Nested tensors: how one becomes a view of a buffer. The rest of their host code runs as it is (`native/layouts.cpp`)."""

import torch
from torch import Tensor

from tonnage.virtual.kernels.registry import kernel

_HOST_CODE = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


@kernel("_nested_view_from_buffer")
def nested_view_from_buffer(self: Tensor, nested_size: Tensor, nested_strides: Tensor, offsets: Tensor) -> Tensor:
    """Sizes, strides and offsets are on the host, and no bytes are touched: the host's code does for the card."""
    made = torch.ops.aten._nested_view_from_buffer.default
    result: Tensor = made.redispatch(_HOST_CODE, self, nested_size, nested_strides, offsets)
    return result
