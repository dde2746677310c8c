"""Logits that are not computed until they are read: what a head returns while chunked-loss is applied.

A deferred tensor records the head's input and later operations: rows sliced, viewed or flattened, dtypes changed,
soft caps. In `cross_entropy` it is computed chunk by chunk and never whole; in anything else it becomes the plain
logits. So any loss runs unchanged. Where PyTorch bypasses tensor subclasses (an `autograd.Function` that takes the
logits), it raises instead of computing something wrong.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map

from tonnage.errors import TonnageError
from tonnage.fit.layers.chunked_cross_entropy import CrossEntropy, Head, chunked_cross_entropy, divide_rows


class LogitsOutdated(TonnageError, RuntimeError):
    """Deferred logits were read after the weights that compute them had changed."""


class LogitsHidden(TonnageError, RuntimeError):
    """Deferred logits reached an operation that bypasses `__torch_function__`."""


@dataclass(frozen=True, kw_only=True)
class LogitsRecipe(Head):
    """How to compute the logits: the head's parts and the operations since.

    The leading dimensions of `hidden`, (..., width), are those of the logits.
    """

    versions: tuple[int, ...]  # of weight and bias when the logits were deferred
    chunk_bytes: int
    classes_second: bool = False  # (batch, classes, positions), as cross_entropy expects

    @property
    def shape(self) -> torch.Size:
        *rows, _ = self.hidden.shape
        classes = self.weight.shape[0]
        return torch.Size([rows[0], classes, *rows[1:]] if self.classes_second else [*rows, classes])

    @property
    def requires_grad(self) -> bool:
        return any(leaf is not None and leaf.requires_grad for leaf in self.leaves)

    def then(self, name: str, argument: Any = None) -> "DeferredLogits":
        return DeferredLogits(replace(self, operations=(*self.operations, (name, argument))))

    def with_rows(self, hidden: Tensor) -> "DeferredLogits":
        return DeferredLogits(replace(self, hidden=hidden))

    def flat(self) -> "LogitsRecipe":
        """Return the same with all rows in one dimension."""
        return replace(self, hidden=self.hidden.reshape(-1, self.hidden.shape[-1]))

    def detached(self) -> "LogitsRecipe":
        bias = None if self.bias is None else self.bias.detach()
        return replace(self, hidden=self.hidden.detach(), weight=self.weight.detach(), bias=bias)

    def compute(self) -> Tensor:
        """Return the plain logits, by the operations that the plain model would have run."""
        self.check_versions()
        hidden, weight = self.hidden.to(self.dtype), self.weight.to(self.dtype)
        bias = None if self.bias is None else self.bias.to(self.dtype)
        with torch.autocast(self.hidden.device.type, enabled=False):
            logits = functional.linear(hidden, weight, bias)
            for name, argument in self.operations:
                logits = logits.tanh() if name == "tanh" else getattr(logits, name)(argument)
        return logits.movedim(-1, 1) if self.classes_second else logits

    def check_versions(self) -> None:
        if self.versions != versions(self.weight, self.bias):
            raise LogitsOutdated(
                "The logits of an earlier forward pass were read after the head's weights had changed.",
                hint="Read them before optimizer.step(), or keep them with logits.detach().clone() in the forward pass.",
            )


def versions(weight: Tensor, bias: Tensor | None) -> tuple[int, ...]:
    """Return the counts of in-place changes, which views and detached tensors share."""
    return tuple(leaf._version for leaf in (weight, bias) if leaf is not None)


def defer(hidden: Tensor, weight: Tensor, bias: Tensor | None, *, chunk_bytes: int) -> Tensor:
    """Return the deferred logits of `linear(hidden, weight, bias)`, in autocast's dtype if enabled."""
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64
    dtype = torch.get_autocast_dtype(device) if autocast else hidden.dtype
    if not torch.is_grad_enabled():
        hidden, weight = hidden.detach(), weight.detach()
        bias = None if bias is None else bias.detach()
    recipe = LogitsRecipe(
        hidden=hidden, weight=weight, bias=bias, dtype=dtype, chunk_bytes=chunk_bytes, versions=versions(weight, bias)
    )
    return DeferredLogits(recipe)


class DeferredLogits(Tensor):
    """A tensor without storage. Once read it holds the real logits, and all operations go to them."""

    recipe: LogitsRecipe
    computed: Tensor | None
    # For a view: the deferred logits it was made from, and how. Writes to one show in both.
    source: "tuple[DeferredLogits, Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None"

    @staticmethod
    def __new__(cls, recipe: LogitsRecipe) -> "DeferredLogits":
        deferred = Tensor._make_wrapper_subclass(
            cls,
            recipe.shape,
            dtype=recipe.logits_dtype,
            device=recipe.hidden.device,
            requires_grad=recipe.requires_grad and torch.is_grad_enabled(),
        )
        deferred.recipe = recipe
        deferred.computed = deferred.source = None
        if deferred.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                deferred.register_hook(_gradient_ends_here)
        return deferred

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = function.__name__  # "view" for a method, "shape" for an attribute
        if name == "__get__":
            name = function.__self__.__name__
        if name in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        if "input" in kwargs:
            args = (kwargs.pop("input"), *args)
        result = _record(name, args, kwargs)
        if result is not NotImplemented:
            if name in _VIEWS and isinstance(result, DeferredLogits) and result is not args[0]:
                result.source = args[0], function, args[1:], kwargs
            return result
        # Whether it changes its tensor in place: `mul_`, `__setitem__`, `__iadd__`.
        changes = (name.endswith("_") and not name.endswith("__")) or name.startswith(("__set", "__i"))
        real = partial(_real, keep=torch.is_grad_enabled() or changes, changes=changes)
        return function(*tree_map(real, args), **tree_map(real, kwargs))

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise LogitsHidden(
            f"The logits reached {operator} in a way that does not let them be computed when they are read.",
            hint="Take the technique chunked-loss away, or read the logits with an ordinary operation first (logits + 0).",
        )


def _gradient_ends_here(gradient: Tensor) -> None:
    """Raise if a gradient arrives here: only an autograd.Function reads logits without computing them first."""
    raise LogitsHidden(
        "An autograd.Function took deferred logits as its input, and their gradient would not reach the head.",
        hint="Take chunked-loss away, or name the layer over the vocabulary with head=.",
    )


def _record(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of a call on deferred logits without computing them, or NotImplemented."""
    logits = args[0] if args else None
    if name not in _DEFERRED or not isinstance(logits, DeferredLogits) or _is_computed(logits):
        return NotImplemented
    try:
        signature(_DEFERRED[name]).bind(*args, **kwargs)
    except TypeError:  # a call signature that is not recorded
        return NotImplemented
    return _DEFERRED[name](*args, **kwargs)


def _is_computed(logits: DeferredLogits) -> bool:
    return logits.computed is not None or (logits.source is not None and _is_computed(logits.source[0]))


def _real(value: Any, *, keep: bool, changes: bool = False) -> Any:
    """Return the real logits of deferred ones. A read without gradients leaves the loss chunked.

    Writing to a view computes the logits that it is a view of.
    """
    if not isinstance(value, DeferredLogits):
        return value
    recipe = value.recipe
    if value.computed is None and value.source is not None and (changes or _is_computed(value)):
        source, function, args, kwargs = value.source
        value.computed = function(_real(source, keep=True, changes=changes), *args, **kwargs)
    if value.computed is None and recipe.requires_grad and not keep:
        return recipe.detached().compute()
    if value.computed is None:
        if recipe.requires_grad and torch.is_grad_enabled():
            warnings.warn(_WHOLE, stacklevel=2)
        with torch.set_grad_enabled(recipe.requires_grad):
            value.computed = recipe.compute()
    return value.computed


_VIEWS = frozenset("view reshape flatten __getitem__ transpose permute".split())
_WHOLE = (
    "The loss reads the logits by other means than cross_entropy, so they are computed whole and chunked-loss saves "
    "nothing. Use torch.nn.functional.cross_entropy, or take chunked-loss away."
)
_METADATA = frozenset(
    "shape dtype device layout ndim requires_grad is_cuda is_cpu is_meta is_sparse is_nested is_quantized itemsize nbytes "
    "size dim ndimension numel nelement element_size is_floating_point is_complex is_signed get_device __len__ _base".split()
)


def _to(logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    kwargs.pop("copy", None)  # what is computed later is a copy
    device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    here = logits.recipe.hidden.device
    elsewhere = device is not None and device not in (here, torch.device(here.type))
    if elsewhere or memory_format is not None or (dtype is not None and not dtype.is_floating_point):
        return NotImplemented
    return logits if dtype in (None, logits.recipe.logits_dtype) else logits.recipe.then("to", dtype)


def _register_hook(logits: DeferredLogits, hook: Callable[[Tensor], Any]) -> Any:
    """Register FSDP2's hook for the start of backward on the head's input; it does not read the gradient."""
    hidden = logits.recipe.hidden
    if not str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp") or not hidden.requires_grad:
        return NotImplemented
    return hidden.register_hook(hook)


def _scale(name: str, logits: DeferredLogits, other: Any) -> Any:
    is_number = isinstance(other, int | float) and not isinstance(other, bool)
    return logits.recipe.then(name, other) if is_number else NotImplemented


def _reshape(logits: DeferredLogits, *shape: Any) -> Any:
    """Reshape the rows if the classes stay the last dimension."""
    recipe = logits.recipe
    sizes = list(shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape)
    if recipe.classes_second or not sizes or not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    known = math.prod(size for size in sizes if size != -1)
    if sizes.count(-1) == 1 and known:
        sizes[sizes.index(-1)] = math.prod(recipe.shape) // known
    if math.prod(sizes) != math.prod(recipe.shape) or sizes[-1] != recipe.shape[-1]:
        return NotImplemented
    return recipe.with_rows(recipe.hidden.reshape(*sizes[:-1], recipe.hidden.shape[-1]))


def _flatten(logits: DeferredLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    shape = logits.recipe.shape
    start, end = start_dim % len(shape), end_dim % len(shape)
    if start > end or end == len(shape) - 1:
        return NotImplemented
    return _reshape(logits, *shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :])


def _index(logits: DeferredLogits, index: Any) -> Any:
    """Index the rows in any way, and the classes by a slice."""
    recipe, parts = logits.recipe, index if isinstance(index, tuple) else (index,)
    known = all(isinstance(part, int | slice | Tensor) or part is Ellipsis for part in parts)
    if recipe.classes_second or not known or any(isinstance(part, bool | DeferredLogits) for part in parts):
        return NotImplemented
    # Split the index into its part over rows and its slice of classes.
    dimensions = len(recipe.shape)
    counted = [part for part in parts if part is not Ellipsis]
    taken = sum(part.dim() if isinstance(part, Tensor) and part.dtype == torch.bool else 1 for part in counted)
    if len(counted) < len(parts):
        place = next(number for number, part in enumerate(parts) if part is Ellipsis)
        parts = (*parts[:place], *[slice(None)] * (dimensions - taken), *parts[place + 1 :])
        taken = dimensions
    classes = slice(None)
    if taken >= dimensions:
        *rows, classes = parts
        if taken > dimensions or not isinstance(classes, slice):
            return NotImplemented
        parts = tuple(rows)
    hidden = recipe.hidden[parts] if parts else recipe.hidden
    if classes == slice(None):
        return recipe.with_rows(hidden)
    bias = None if recipe.bias is None else recipe.bias[classes]
    return DeferredLogits(replace(recipe, hidden=hidden, weight=recipe.weight[classes], bias=bias))


def _transpose(logits: DeferredLogits, first: int, second: int) -> Any:
    order = list(range(len(logits.recipe.shape)))
    order[first], order[second] = order[second], order[first]
    return _permute(logits, *order)


def _permute(logits: DeferredLogits, *order: Any) -> Any:
    """Support only moving the classes behind the batch, where `cross_entropy` expects them."""
    recipe = logits.recipe
    dimensions = len(recipe.shape)
    given = order[0] if len(order) == 1 and isinstance(order[0], tuple | list) else order
    moved = [0, dimensions - 1, *range(1, dimensions - 1)]
    if recipe.classes_second or dimensions < 3 or [place % dimensions for place in given] != moved:
        return NotImplemented
    return DeferredLogits(replace(recipe, classes_second=True))


def _argmax(logits: DeferredLogits, dim: int | None = None, keepdim: bool = False) -> Any:
    recipe = logits.recipe.detached()
    if dim is None or recipe.classes_second or dim % len(recipe.shape) != len(recipe.shape) - 1:
        return NotImplemented
    rows = recipe.flat().hidden
    chunks = divide_rows(rows.shape[0], recipe.weight.shape[0] * recipe.dtype.itemsize, recipe.chunk_bytes)
    best = torch.cat([replace(recipe, hidden=rows[chunk]).compute().argmax(-1) for chunk in chunks])
    best = best.reshape(recipe.shape[:-1])
    return best.unsqueeze(-1) if keepdim else best


def _cross_entropy(
    input: DeferredLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    recipe = input.recipe
    unusual = size_average is not None or reduce is not None or reduction not in ("mean", "sum", "none")
    constants = all(not value.requires_grad for value in (target, weight) if value is not None)
    leading = recipe.hidden.shape[:-1]
    suits = len(leading) == 1 or (recipe.classes_second and len(leading) > 1)
    here = math.prod(leading) and target.device == recipe.hidden.device
    if not suits or not here or unusual or not constants or not 0 <= label_smoothing <= 1:
        return NotImplemented
    # The target with one row per prediction.
    if target.shape == leading and target.dtype == torch.int64:
        rows = target.reshape(-1)
    elif target.shape == recipe.shape and target.is_floating_point() and not isinstance(target, DeferredLogits):
        last = target.movedim(1, -1) if recipe.classes_second else target
        rows = last.reshape(-1, recipe.weight.shape[0])
    else:
        return NotImplemented
    recipe.check_versions()
    loss = CrossEntropy(
        target=rows,
        class_weight=weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )
    losses = chunked_cross_entropy(recipe.flat(), loss, chunk_bytes=recipe.chunk_bytes)
    return losses.reshape(leading) if reduction == "none" else losses


_DEFERRED: dict[str, Callable[..., Any]] = {
    "float": lambda logits: logits.recipe.then("to", torch.float32),
    "double": lambda logits: logits.recipe.then("to", torch.float64),
    "half": lambda logits: logits.recipe.then("to", torch.float16),
    "bfloat16": lambda logits: logits.recipe.then("to", torch.bfloat16),
    "to": _to,
    "contiguous": lambda logits: logits,
    "clone": lambda logits: DeferredLogits(logits.recipe),
    "detach": lambda logits: DeferredLogits(logits.recipe.detached()),
    "tanh": lambda logits: logits.recipe.then("tanh"),
    "mul": partial(_scale, "mul"),
    "div": partial(_scale, "div"),
    "view": _reshape,
    "reshape": _reshape,
    "flatten": _flatten,
    "__getitem__": _index,
    "transpose": _transpose,
    "permute": _permute,
    "argmax": _argmax,
    "cross_entropy": _cross_entropy,
    "register_hook": _register_hook,
}
