"""Sparse (COO) tensors: coalescing and sums. Device-independent code of PyTorch runs unchanged, also for nested
tensors.

Coalescing merges equal indices; the number left is counted if the indices are known, else expected (`values`). Not
modelled: products of two sparse tensors, and matrix products.
"""

import torch
from torch import Tensor

from tonnage.virtual.kernels.cub import merge_sort_bytes, unique_by_key_bytes
from tonnage.virtual.kernels.registry import kernel, scratch
from tonnage.virtual.kernels.sorting import expected_distinct
from tonnage.virtual.kernels.values import is_known, put

_HOST_CODE = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


@kernel("_to_sparse", "_to_sparse.sparse_dim")
def to_sparse(self: Tensor, *arguments: object, **options: object) -> Tensor:
    """Convert with PyTorch's code, which is the same for all devices."""
    made = torch.ops.aten._to_sparse.sparse_dim if arguments else torch.ops.aten._to_sparse.default
    result: Tensor = made.redispatch(_HOST_CODE, self, *arguments, **options)
    return result


@kernel("_nested_view_from_buffer")
def nested_view_from_buffer(*arguments: Tensor) -> Tensor:
    """Use the host's code: sizes, strides and offsets are on the host, and no data is accessed."""
    result: Tensor = torch.ops.aten._nested_view_from_buffer.default.redispatch(_HOST_CODE, *arguments)
    return result


@kernel("_coalesce", sparse=True)
def coalesce(self: Tensor) -> Tensor:
    """Sort the indices, keep one of each, and sum the values that share it."""
    count = self._nnz()
    if count < 2:
        return self.clone()._coalesced_(True)
    # Flat indices, sorted together with their positions.
    indices, values = self._indices(), self._values()
    flat = _flat_indices(indices, self.shape, copy=True)
    places, offsets = (torch.empty(count, dtype=torch.int64, device=self.device) for _ in range(2))
    scratch(merge_sort_bytes(count, 8, 8), flat)
    scratch(unique_by_key_bytes(count, 8), flat)
    # Distinct indices keep the storage of all; values get a new one.
    distinct = torch.unique(flat.cpu()) if is_known(flat) else None
    left = expected_distinct(flat) if distinct is None else distinct.numel()
    if distinct is not None:
        put(flat, torch.nn.functional.pad(distinct, (0, count - left)))
    flat = flat.resize_(1, left)
    summed = values.new_empty((left, *values.shape[1:]))
    laid = values.contiguous()
    del laid
    found, shape = flat, self.shape[: self.sparse_dim()]
    if len(shape) > 1:  # coordinates, a row for each dimension
        found = torch.empty((len(shape), left), dtype=torch.int64, device=flat.device)
        if is_known(flat):
            put(found, torch.stack(torch.unravel_index(flat.cpu().squeeze(0), tuple(shape))))
    result: Tensor = torch.ops.aten._sparse_coo_tensor_unsafe(found, summed, self.shape)._coalesced_(True)
    del offsets, places, flat
    return result


def _flat_indices(indices: Tensor, shape: torch.Size, *, copy: bool) -> Tensor:
    """Return the linear index of each element in the sparse dimensions."""
    dims = indices.shape[0]
    if dims == 1:
        flat = indices.squeeze(0)
        return flat.clone(memory_format=torch.contiguous_format) if copy else flat
    steps = torch.tensor([shape[d + 1 : dims].numel() for d in range(dims)], device="cpu").unsqueeze(1)
    return (indices * steps.to(indices.device)).sum(0)


@kernel("add.out", sparse=True)
def add_out(self: Tensor, other: Tensor, *, alpha: float = 1, out: Tensor) -> Tensor:
    """Add a sparse tensor to a dense one, or concatenate two sparse ones."""
    if self.is_sparse and not other.is_sparse:
        raise RuntimeError("add(sparse, dense) is not supported. Use add(dense, sparse) instead.")
    dtype = torch.result_type(self, other)
    if not self.is_sparse:  # add rows at their indices; uncoalesced tensors use `index_add_`
        result = out if out.dtype == dtype else torch.empty_like(self, dtype=dtype)
        base, values = self.to(dtype), other._values().to(dtype)
        if result is not base:
            result.resize_as_(self).copy_(base)
        if other.is_coalesced():
            values = values.contiguous()
            result.add_(0)
        elif other._nnz():
            places = _flat_indices(other._indices(), other.shape, copy=False)
            rows = other.shape[: other.sparse_dim()].numel()
            result.view(rows, -1).index_add_(0, places, values.reshape(other._nnz(), -1))
        return out if result is out else out.copy_(result)
    added = other._values().to(dtype)
    if alpha != 1:
        added = added * alpha
    indices = torch.cat([self._indices(), other._indices()], 1)
    values = torch.cat([self._values().to(dtype), added]).to(out.dtype)
    del added
    out.resize_as_sparse_(other)
    torch.ops.tonnage.alias_into_sparse(out, indices, values)
    if out._nnz() > out.numel():
        merged = out.coalesce()
        torch.ops.tonnage.alias_into_sparse(out, merged._indices(), merged._values())
    return out
