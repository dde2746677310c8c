"""Indexing, sorting and scans, pooling and resizing.

Index values are unknown: rows are assumed to be spread evenly over a table, without strong repetition.
"""

import json
from functools import partial
from math import ceil, prod

from tonnage.clock.kernels import memory
from tonnage.clock.kernels.figures import Reader, careful
from tonnage.clock.kernels.memory import launch
from tonnage.clock.launch import Launch, Settings
from tonnage.clock.operators import OperatorCall, Shape

seconds = memory.seconds

_INTEGERS = ("long int", "long", "int", "bool", "unsigned char")
_FEW_INDICES = 3072  # up to here, an embedding's gradient is computed without sorting
_SORTING_KERNELS = 26  # launched by a radix sort of long integers and its bookkeeping


def _taken(call: OperatorCall, settings: Settings) -> Launch | None:
    """Read rows of a table: embedding(table, indices), index_select(table, axis, indices), index(table, [indices])."""
    table, each = call.shapes[0], call.element_bytes(0)
    # The number of indices; an unrecorded list is assumed to have one per row of the table.
    count = table[0] if table else 1
    for at, shape in enumerate(call.shapes[1:], 1):
        if shape and isinstance(shape[0], tuple):
            count = max(prod(one) for one in shape)
            break
        if shape and at < len(call.types) and call.types[at] in _INTEGERS:
            count = prod(shape)
            break
    text = call.value(1) if call.name in ("index_select", "gather", "index_add", "index_add_") else ""
    axis = int(text) if text.lstrip("-").isdigit() else 0
    width = prod(table) // max(1, table[axis]) if table else 1
    return _rows(call, int(count), width, prod(table), each, "taken" if width * each % 16 == 0 else "taken_elements")


def _gather(call: OperatorCall, settings: Settings) -> Launch | None:
    """Read elements by index; with an `out` argument it is index_select's way to take rows, by repeated indices."""
    index = call.shapes[2]
    strides: Shape = call.strides[2] if len(call.strides) > 2 else ()
    repeats = len(strides) > 1 and strides[-1] == 0 and index[-1] > 1
    if len(call.shapes) > 4 or repeats:
        return _rows(call, index[0], prod(index[1:]), prod(call.shapes[0]), call.element_bytes(0), "taken")
    elements, each = prod(index), call.element_bytes(0)
    moved = elements * (8.0 + each) + min(elements * memory.SECTOR_BYTES, prod(call.shapes[0]) * each)
    return launch("indexing", call, moved=moved, elements=elements, accesses=3.0 * elements, variant="taken_elements")


def _rows(call: OperatorCall, rows: int, width: int, table: int, each: int, variant: str) -> Launch | None:
    elements = rows * width
    moved, accesses = elements * each + min(elements, table) * each + rows * 8.0, 2.0 * elements
    return launch("indexing", call, moved=moved, elements=elements, blocks=rows, accesses=accesses, variant=variant)


def _added(call: OperatorCall, settings: Settings, *, at: int) -> Launch | None:
    """Read elements added or written at indices."""
    source = call.shapes[at] if len(call.shapes) > at and call.shapes[at] else call.shapes[2]
    elements, each = prod(source), call.element_bytes(0)
    moved = elements * each + 2.0 * min(elements, prod(call.shapes[0])) * each + elements / source[-1] * 8.0
    atomic = "added_narrow" if each < 4 else "added_wide"
    return launch("indexing", call, moved=moved, elements=elements, accesses=2.0 * elements, variant=atomic)


def _index_put(call: OperatorCall, settings: Settings) -> Launch | None:
    """Read _index_put_impl_(table, indices, values, accumulate): with accumulation, indices are sorted first."""
    if call.value(3) == "False":
        return _added(call, settings, at=2)
    elements, table, each = prod(call.shapes[2]), call.shapes[0], call.element_bytes(0)
    moved = elements * each + 2.0 * min(elements, prod(table)) * each
    count = elements // max(1, min(elements, prod(table[1:])))
    variant = "put+sorted_numbers"
    return launch("indexing", call, moved=moved, elements=elements, blocks=count, variant=variant, kernels=12)


def _embedding_backward(call: OperatorCall, settings: Settings) -> Launch | None:
    """Read embedding_dense_backward(gradient, indices, …); another operator zeroes the table."""
    elements, count = prod(call.shapes[0]), prod(call.shapes[1])
    blocks, variant, kernels = count, "embedding_backward+sorted_numbers", _SORTING_KERNELS
    if count <= _FEW_INDICES:
        blocks, variant, kernels = ceil(elements / count / 32), "embedding_backward_few", 0
    moved = 3.0 * elements * call.element_bytes(0)
    return launch("indexing", call, moved=moved, elements=elements, blocks=blocks, variant=variant, kernels=kernels)


def _by_rows(
    call: OperatorCall, settings: Settings, *, variant: str, written: float = 1.0, kernels: int = 1
) -> Launch | None:
    shape = call.shapes[0]
    elements, each = prod(shape), call.element_bytes(0)
    rows = elements // shape[-1] if shape and shape[-1] else 1
    moved = elements * each * (1.0 + written)
    return launch("sorting", call, moved=moved, elements=elements, blocks=rows, variant=variant, kernels=kernels)


def _windows(call: OperatorCall, settings: Settings, *, variant: str) -> Launch | None:
    """Read pooling: every tensor is read, and at most one of the first one's size written."""
    tensors = list(call.tensors())
    elements = max(prod(call.shapes[at]) for at in tensors)
    moved = sum(map(call.tensor_bytes, tensors)) + elements * call.element_bytes(tensors[0]) / 2
    return launch("indexing", call, moved=moved, elements=elements, accesses=2.0 * elements, variant=variant)


def _averaged(call: OperatorCall, settings: Settings, *, variant: str, sizes_at: int) -> Launch | None:
    """Read averages: each output's thread computes its windows, which takes longer than reading them."""
    window, step = (json.loads(call.value(at) or "[]") for at in (sizes_at, sizes_at + 1))
    elements, apart = prod(call.shapes[sizes_at - 1]), prod(step or window)
    moved = 2.0 * sum(map(call.tensor_bytes, call.tensors()))
    accesses = elements * (prod(window) / apart)  # an element is in several windows
    written = elements if sizes_at > 1 else elements // apart
    return launch("indexing", call, moved=moved, elements=written, accesses=accesses, variant=variant)


_POOLED, _POOLED_BACKWARD = (partial(_windows, variant=variant) for variant in ("pooled", "pooled_backward"))
_READERS: dict[str, Reader] = {
    "index take _unsafe_index masked_select": _taken,
    "gather": _gather,
    "index_add index_add_ index_copy_ index_fill_ scatter_add_ scatter_ scatter_reduce_ index_reduce_": partial(
        _added, at=3
    ),
    "_index_put_impl_": _index_put,
    "embedding_dense_backward": _embedding_backward,
    "sort": partial(_by_rows, variant="sort", written=9.0, kernels=4),
    "topk kthvalue median": partial(_by_rows, variant="topk"),
    "cumsum cumprod cummax cummin logcumsumexp": partial(_by_rows, variant="scan"),
    "_unique2 unique_dim unique_consecutive nonzero histc bincount": partial(_by_rows, variant="sort", kernels=8),
    "max_pool2d_with_indices _adaptive_avg_pool2d avg_pool3d": _POOLED,
    "avg_pool2d": partial(_averaged, variant="averaged", sizes_at=1),
    "avg_pool2d_backward": partial(_averaged, variant="averaged_backward", sizes_at=2),
    "max_pool2d_with_indices_backward _adaptive_avg_pool2d_backward max_pool3d_with_indices": _POOLED_BACKWARD,
    "upsample_nearest2d upsample_bilinear2d upsample_nearest1d upsample_bicubic2d": _POOLED,
    "upsample_nearest2d_backward upsample_bilinear2d_backward": _POOLED_BACKWARD,
}
OPERATORS = careful({name: read for names, read in _READERS.items() for name in names.split()})
# These call gather, which a real GPU's trace has inside them. Used for captures without inner operators.
WHEN_ALONE = careful(dict.fromkeys(("embedding", "index_select"), _taken))
