"""Bytes and operations of an operator call, from the shapes and types that a trace recorded.

Families of operators are data (`data/operators.toml`). Unknown operators, or ones without recorded shapes, have work
None. Bytes are compulsory traffic: a kernel may move more, and less only if it hits a cache.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import isfinite, prod
from typing import Any

from tonnage.clock import facts


@dataclass(frozen=True, slots=True)
class Work:
    """Operations, and bytes to and from memory; None if unknown."""

    operations: float | None
    moved_bytes: float | None
    precision: str = "fp32"

    @property
    def intensity(self) -> float | None:
        """Operations per byte."""
        return self.operations / self.moved_bytes if self.operations and self.moved_bytes else None


_ELEMENT_IN_KERNEL = re.compile(r"OpaqueType<(\d+)u?>")
_TYPE_IN_KERNEL = re.compile(r"Functor<(float|double|c10::BFloat16|c10::Half)\b")
_FLOAT_BYTES = 4
_CAUSAL = ("True", "1", "2")

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCall:
    """An operator call: `shapes` holds a tuple of numbers, or a tuple of tuples for a list of tensors."""

    name: str
    shapes: tuple[Any, ...] = ()
    strides: tuple[Any, ...] = ()
    types: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()

    def element_bytes(self, at: int) -> int:
        """Return the element size of a tensor."""
        size: int = facts("operators")["bytes"][self.types[at]]
        return size

    def tensor_bytes(self, at: int) -> float:
        """Return the bytes of a tensor; dimensions with stride 0 are stored once."""
        shape = self.shapes[at]
        strides = self.strides[at] if at < len(self.strides) else ()
        if len(strides) == len(shape):
            shape = [extent for extent, stride in zip(shape, strides, strict=True) if stride != 0]
        return float(prod(shape) * self.element_bytes(at))

    def value(self, at: int) -> str:
        """Return a number, flag or list as text; empty if not recorded."""
        return self.values[at] if at < len(self.values) else ""

    def tensors(self) -> Iterator[int]:
        """Yield the indices of tensors of known types. A number wrapped as a tensor (type double, no shape) is none."""
        known = facts("operators")["bytes"]
        for at, (name, shape) in enumerate(zip(self.types, self.shapes, strict=False)):
            if name in known and not (name == "double" and shape == ()):
                yield at


def work_of(call: OperatorCall) -> Work | None:
    """Return what the call must do; None if unknown."""
    if not call.shapes:
        return None
    try:
        family = _families().get(call.name)
        work = family(call) if family else None
        # A trace may hold any numbers.
        figures = (work.operations or 0.0, work.moved_bytes or 0.0) if work else ()
        return work if all(isfinite(figure) and figure >= 0 for figure in figures) else None
    except (IndexError, TypeError, KeyError, ValueError, ArithmeticError):
        # Arguments of another version's operator: not known.
        return None


def _product(call: OperatorCall) -> Work | None:
    at = facts("operators")["products"][call.name]
    left, right = call.shapes[at], call.shapes[at + 1]
    inner = right[-2] if len(right) > 1 else right[-1]
    if not left or left[-1] != inner:
        return None
    columns = right[-1] if len(right) > 1 else 1
    out_elements = prod(left[:-1]) * columns
    out_bytes = facts("operators")["product_out"].get(call.name, call.element_bytes(at))
    moved = call.tensor_bytes(at) + call.tensor_bytes(at + 1) + out_elements * out_bytes
    if at:
        moved += call.tensor_bytes(0)
    return Work(2.0 * out_elements * left[-1], moved, _precision(call, at))


def _precision(call: OperatorCall, at: int) -> str:
    """Return the precision of the arithmetic: TF32 if a kernel's name says so."""
    name: str = facts("operators")["precision"].get(call.types[at], "fp32")
    return "tf32" if name == "fp32" and any("tf32" in kernel for kernel in call.kernels) else name


def _attention(call: OperatorCall) -> Work | None:
    table = facts("operators")["attention"][call.name]
    at, heads_axis = table["query"], table["heads"]
    if "lengths" in table and call.shapes[table["lengths"]]:
        return None
    query, key, value = (call.shapes[at + offset] for offset in range(3))
    if len(query) != 4:
        return None
    rows, columns = query[3 - heads_axis], key[3 - heads_axis]
    pairs: float = rows * columns
    if call.value(table["causal"]) in _CAUSAL:
        pairs -= rows * (rows - 1) / 2 if columns >= rows else rows * columns - columns * (columns + 1) / 2
    each = query[0] * query[heads_axis] * pairs
    mean_width = (query[3] + value[3]) / 2
    # The forward reads three tensors and writes one; the backward reads five and writes three.
    sizes = [call.tensor_bytes(at + offset) for offset in range(3)]
    out_bytes = prod(query[:3]) * value[3] * call.element_bytes(at)
    moved = sum(sizes) + out_bytes if not at else 2 * sum(sizes) + 2 * out_bytes
    return Work(2.0 * table["products"] * each * mean_width, moved, _precision(call, at))


def _convolution(call: OperatorCall) -> Work | None:
    table = facts("operators")["convolution"][call.name]
    at = table["input"]
    image, weight = call.shapes[at], call.shapes[at + 1]
    space = len(image) - 2
    stride, padding, dilation = (_numbers(call.value(table[word]), space) for word in ("stride", "padding", "dilation"))
    if call.name == "_convolution" and call.value(6) == "True":  # transposed
        return None
    out = [
        (extent + 2 * pad - hole * (kernel - 1) - 1) // step + 1
        for extent, kernel, step, pad, hole in zip(image[2:], weight[2:], stride, padding, dilation, strict=True)
    ]
    out_elements = image[0] * weight[0] * prod(out)
    passes = 1
    if "mask" in table:
        # Gradients of the input and of the weight; that of the bias is a sum.
        passes = sum("True" in word for word in call.value(table["mask"]).split(",")[:2])
    once = call.tensor_bytes(at) + call.tensor_bytes(at + 1) + out_elements * call.element_bytes(at)
    operations = 2.0 * out_elements * weight[1] * prod(weight[2:])
    return Work(passes * operations, passes * once, _precision(call, at))


def _numbers(text: str, count: int) -> Sequence[int]:
    numbers = [int(number) for number in re.findall(r"-?\d+", text)]
    return numbers * count if len(numbers) == 1 else numbers


def _elementwise(call: OperatorCall, each: int, out_bytes: int = 0) -> Work | None:
    tensors = list(call.tensors())
    if not tensors:
        return None
    elements = prod(broadcast([call.shapes[at] for at in tensors]))
    widest = max(call.element_bytes(at) for at in tensors)
    written = call.element_bytes(0) if call.name.endswith("_") else out_bytes or widest
    return Work(float(each * elements), sum(map(call.tensor_bytes, tensors)) + elements * written)


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """Return the broadcast shape."""
    longest = max(map(len, shapes))
    padded = [(1,) * (longest - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(0 if 0 in extents else max(extents) for extents in zip(*padded, strict=True))


def _reduction(call: OperatorCall, each: int) -> Work:
    shape = call.shapes[0]
    axes = {axis % len(shape) for axis in _numbers(call.value(1), 1)} if shape and "[" in call.value(1) else set()
    kept = prod(extent for axis, extent in enumerate(shape) if axis not in axes) if axes else 1
    return Work(float(each * prod(shape)), call.tensor_bytes(0) + kept * call.element_bytes(0))


def _rowwise(call: OperatorCall, each: int) -> Work:
    elements = prod(call.shapes[0])
    written = _FLOAT_BYTES if call.name in ("_softmax", "_log_softmax") and call.value(2) == "True" else 0
    out_bytes = elements * (written or call.element_bytes(0))
    return Work(float(each * elements), sum(map(call.tensor_bytes, call.tensors())) + out_bytes)


def _rows(call: OperatorCall) -> Work:
    """Read rows of a table by index: embedding(weight, indices), index_select(table, axis, indices), gather."""
    at = next(at for at in call.tensors() if call.types[at] in ("long int", "long", "int"))
    width = call.shapes[0][-1] if call.name != "gather" else 1
    elements = prod(call.shapes[at]) * width
    return Work(0.0, call.tensor_bytes(at) + 2 * elements * call.element_bytes(0))


def _embedding_backward(call: OperatorCall) -> Work:
    """Read gradients and indices; a gradient of the whole table is written."""
    table = int(call.value(2)) * call.shapes[0][-1] * call.element_bytes(0)
    return Work(float(prod(call.shapes[0])), call.tensor_bytes(0) + call.tensor_bytes(1) + table)


def _cat(call: OperatorCall) -> Work | None:
    """Read a concatenation. The kernel's name gives the element size: the trace does not for lists."""
    width = next((int(found[1]) for kernel in call.kernels if (found := _ELEMENT_IN_KERNEL.search(kernel))), 0)
    elements = sum(prod(shape) for shape in call.shapes[0])
    return Work(0.0, 2.0 * elements * width) if width and elements else None


def _lists(call: OperatorCall) -> Work | None:
    """Read fused updates of many tensors; long lists are not recorded, and then nothing is known."""
    named = next((found[1] for kernel in call.kernels if (found := _TYPE_IN_KERNEL.search(kernel))), "")
    elements = sum(prod(shape) for shape in call.shapes[0])
    if not named or not elements:
        return None
    passes = facts("operators")["lists"][call.name]
    return Work(2.0 * passes * elements, float(passes * elements * facts("operators")["bytes"][named]))


_BY_FAMILY: dict[str, Callable[..., Work | None]] = {
    "elementwise": _elementwise,
    "comparison": partial(_elementwise, out_bytes=1),
    "written": lambda call, each: Work(0.0, call.tensor_bytes(0)),
    "reduction": _reduction,
    "rowwise": _rowwise,
    "rowwise_backward": _rowwise,
}
_ALONE: dict[str, Callable[[OperatorCall], Work | None]] = {
    "copy_": lambda call: Work(0.0, call.tensor_bytes(0) + call.tensor_bytes(1)),
    "cat": _cat,
    **dict.fromkeys(("embedding", "index_select", "gather"), _rows),
    "embedding_dense_backward": _embedding_backward,
}
_BY_TABLE: dict[str, Callable[[OperatorCall], Work | None]] = {
    "products": _product,
    "attention": _attention,
    "convolution": _convolution,
    "lists": _lists,
}


@cache
def _families() -> dict[str, Callable[[OperatorCall], Work | None]]:
    tables, found = facts("operators"), dict(_ALONE)
    for family, work in _BY_FAMILY.items():
        for each, names in tables[family].items():
            found.update(dict.fromkeys(names.split(), partial(work, each=int(each))))
    for family, work in _BY_TABLE.items():
        found.update(dict.fromkeys(tables[family], work))
    return found


@cache
def shapeless() -> frozenset[str]:
    """Return operators whose shapes do not matter: views, and casts, whose copy has the shapes."""
    return frozenset(f"{facts('silent')['views']} {facts('silent')['casts']}".split())


@cache
def silent() -> frozenset[str]:
    """Return all of them."""
    return frozenset(" ".join(facts("silent").values()).split())
