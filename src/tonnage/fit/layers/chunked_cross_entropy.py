"""A linear head and its cross-entropy in one pass over chunks of rows: the logits never exist as a whole.

    head = Head(hidden=hidden, weight=weight, dtype=weight.dtype)
    loss = chunked_cross_entropy(head, CrossEntropy(target=labels), chunk_bytes=512 << 20)

If the loss is reduced to one number, gradients are computed in the forward pass, while a chunk's logits exist:
recomputing in backward would multiply by the head again. They stay unscaled (a 16-bit dtype would lose precision in
a division by the token count) and backward scales them once. Per-row losses (`reduction="none"`) get their upstream
gradients only in backward, so there the chunks are computed twice.

Class labels on a GPU take one kernel per chunk (`cross_entropy_kernel`); everything else uses PyTorch's operators.
PyTorch 2.13's own `linear_cross_entropy` has no label smoothing, soft targets or soft caps in chunks, and older
versions lack it. It does not know where the head comes from: see `deferred_logits`.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tonnage.fit.stepping.stochastic import has_triton
from tonnage.fit.virtual import on_virtual_gpu

# One elementwise operation after the head: "to" with a dtype, "mul" or "div" with a number, "tanh" with None.
Operation = tuple[str, Any]
Gradients = list[Tensor | None]  # of hidden, weight and bias
_ROWS_MULTIPLE = 64  # of a chunk, for tensor cores
_ALIGNED_BYTES = 16  # for other alignments of logit rows, matrix kernels are several times slower
_TILE_ROWS = 8192  # of a weight gradient, if a product cannot be accumulated in place


@dataclass(frozen=True, kw_only=True)
class Head:
    """How rows become logits: `hidden @ weight.T + bias` in `dtype`, then operations one by one."""

    hidden: Tensor  # (rows, width)
    weight: Tensor  # (classes, width)
    bias: Tensor | None = None
    dtype: torch.dtype  # of the matrix product: autocast may narrow it
    operations: tuple[Operation, ...] = ()

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.hidden, self.weight, self.bias

    @property
    def logits_dtype(self) -> torch.dtype:
        """The dtype after all operations, which the loss reads."""
        return next((argument for name, argument in reversed(self.operations) if name == "to"), self.dtype)


@dataclass(frozen=True, kw_only=True)
class CrossEntropy:
    """The arguments of `torch.nn.functional.cross_entropy`, with one row per prediction."""

    target: Tensor  # (rows,) of classes, or (rows, classes) of probabilities
    class_weight: Tensor | None = None
    ignore_index: int = -100
    label_smoothing: float = 0.0
    reduction: str = "mean"


def chunked_cross_entropy(head: Head, loss: CrossEntropy, *, chunk_bytes: int) -> Tensor:
    """Return the loss over the logits of `head`: a scalar, or one value per row with `reduction="none"`."""
    wanted = tuple(torch.is_grad_enabled() and leaf is not None and leaf.requires_grad for leaf in head.leaves)
    found: Tensor = _ChunkedCrossEntropy.apply(*head.leaves, _ChunkPass(head, loss, chunk_bytes, wanted))
    return found


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, walk: "_ChunkPass") -> Tensor:
        reduction = walk.reduction
        losses, gradients = walk.run((hidden, weight, bias), differentiate=any(walk.wanted) and reduction != "none")
        ctx.save_for_backward(hidden, weight, bias)
        ctx.walk, ctx.gradients = walk, gradients
        if reduction != "none":
            losses = losses.sum()
        return (losses / walk.loss.denominator if reduction == "mean" else losses).to(walk.result_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        walk: _ChunkPass = ctx.walk
        upstream = upstream.to(walk.compute_dtype)
        if walk.reduction == "none":
            _, gradients = walk.run(ctx.saved_tensors, differentiate=True, upstream=upstream)
            return *_finished(gradients, None, walk.leaf_dtypes), None
        # Scaled in place, so a second backward through a retained graph computes them again.
        gradients, ctx.gradients = ctx.gradients, []
        if not gradients:
            _, gradients = walk.run(ctx.saved_tensors, differentiate=True)
        scale = upstream
        if walk.reduction == "mean":
            # A mean over no labels is NaN, but its gradients are zero, as in PyTorch.
            scale = torch.where(walk.loss.denominator == 0, 0.0, upstream / walk.loss.denominator)
        return *_finished(gradients, scale, walk.leaf_dtypes), None


def _finished(gradients: Gradients, scale: Tensor | None, dtypes: tuple[torch.dtype, ...]) -> Gradients:
    """Return scaled gradients in the dtypes of their leaves; empties the list to drop its references."""
    results: Gradients = []
    for dtype in dtypes:
        gradient = gradients.pop(0)
        if gradient is not None and scale is not None:
            out = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
            # One dimension, not zero: a 0-d scale would first be rounded to the gradient's dtype.
            gradient = torch.mul(gradient, scale.reshape(1), out=out)
        results.append(None if gradient is None else gradient.to(dtype))
    return results


class _ClassLabels:
    """The loss of rows with one label each, whose weights are known before the logits."""

    def __init__(self, loss: CrossEntropy, classes: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.smoothing = loss.label_smoothing
        counted = loss.target != loss.ignore_index
        self.label = torch.where(counted, loss.target, 0)[:, None]
        counted = counted[:, None].to(dtype)
        one = counted.new_ones(1)
        self.class_weight = one if loss.class_weight is None else loss.class_weight.to(dtype)
        weight = counted if loss.class_weight is None else counted * self.class_weight[self.label]
        self.denominator = weight.sum()  # of the mean: the labels' own weights, smoothed or not
        self.label_mass = weight * (1 - self.smoothing)
        self.spread = counted * (self.smoothing / classes)  # per class, times the class's weight
        self.mass = self.label_mass + self.spread * self.class_weight.expand(classes).sum()

    def losses(self, rows: slice, logits: Tensor, normaliser: Tensor) -> Tensor:
        own = logits.gather(1, self.label[rows]).to(self.dtype)
        losses = self.mass[rows] * normaliser - self.label_mass[rows] * own
        if self.smoothing:
            if self.class_weight.numel() == 1:
                weighted = logits.sum(dim=-1, keepdim=True, dtype=self.dtype) * self.class_weight
            else:
                weighted = logits.to(self.dtype) @ self.class_weight[:, None]
            losses -= self.spread[rows] * weighted
        # An ignored row does not count, even if its logits are NaN.
        return losses.masked_fill_(self.mass[rows] == 0, 0)[:, 0]

    def gradient(
        self, rows: slice, exponentials: Tensor, total: Tensor, upstream: Tensor | float, out: Tensor
    ) -> Tensor:
        """Return the gradient of the logits, in the memory of `out` or of their exponentials, which sum to `total`."""
        label, label_mass = self.label[rows], self.label_mass[rows] * upstream
        factor = self.mass[rows] * upstream / total
        if self.smoothing:
            exponentials.mul_(factor).addcmul_(self.spread[rows] * upstream, self.class_weight, value=-1)
            own = exponentials.gather(1, label) - label_mass
            return exponentials.scatter_(1, label, own)
        own = exponentials.gather(1, label) * factor - label_mass
        # One pass multiplies and narrows; the label's own entry is rounded once, after its subtraction.
        gradient = torch.mul(exponentials, factor, out=out)
        return gradient.scatter_(1, label, own.to(gradient.dtype))


class _Probabilities:
    """The loss of rows whose target is a distribution over the classes."""

    def __init__(self, loss: CrossEntropy, classes: int, dtype: torch.dtype) -> None:
        self.loss = loss
        self.classes = classes
        self.dtype = dtype
        self.denominator = torch.full((), loss.target.shape[0], dtype=dtype, device=loss.target.device)

    def _masses(self, rows: slice) -> Tensor:
        smoothing = self.loss.label_smoothing
        masses = self.loss.target[rows].to(self.dtype)
        if smoothing:
            masses = masses * (1 - smoothing) + smoothing / self.classes
        return masses if self.loss.class_weight is None else masses * self.loss.class_weight.to(self.dtype)

    def losses(self, rows: slice, logits: Tensor, normaliser: Tensor) -> Tensor:
        masses = self._masses(rows)
        return masses.sum(dim=-1) * normaliser[:, 0] - (masses * logits).sum(dim=-1)

    def gradient(
        self, rows: slice, exponentials: Tensor, total: Tensor, upstream: Tensor | float, out: Tensor
    ) -> Tensor:
        masses = self._masses(rows)
        return exponentials.mul_(masses.sum(dim=-1, keepdim=True) / total).sub_(masses).mul_(upstream)


class _ChunkPass:
    """One pass over all chunks: the losses by row and, if wanted, the gradients. Holds no leaf."""

    def __init__(self, head: Head, loss: CrossEntropy, chunk_bytes: int, wanted: tuple[bool, ...]) -> None:
        self.reduction = loss.reduction
        self.wanted = wanted
        self.dtype = head.dtype
        self.operations = tuple(operation for operation in head.operations if operation[0] != "to")
        self.compute_dtype = torch.promote_types(head.logits_dtype, torch.float32)
        # Autocast makes every loss FP32, whatever the dtype of the logits.
        autocast = torch.is_autocast_enabled(head.hidden.device.type)
        self.result_dtype = self.compute_dtype if autocast else head.logits_dtype
        self.leaf_dtypes = tuple(head.dtype if leaf is None else leaf.dtype for leaf in head.leaves)
        self.classes = head.weight.shape[0]
        self.padding = _padding(head, loss)
        self.chunks = divide_rows(head.hidden.shape[0], self.classes * head.dtype.itemsize, chunk_bytes)
        kind = _ClassLabels if loss.target.dim() == 1 else _Probabilities
        self.loss = kind(loss, self.classes, self.compute_dtype)
        # One kernel computes a chunk's losses and gradient on a GPU, if Triton is installed.
        device, plain_labels = head.hidden.device, loss.target.dim() == 1 and not loss.label_smoothing
        has_kernel = device.type == "cuda" and plain_labels and (on_virtual_gpu(device) or has_triton())
        self.by_kernel = self.compute_dtype == torch.float32 and not self.operations and has_kernel

    def run(
        self, leaves: tuple[Tensor, Tensor, Tensor | None], *, differentiate: bool, upstream: Tensor | None = None
    ) -> tuple[Tensor, Gradients]:
        """Return the losses of all rows, and gradients of their sum with each row weighted by its upstream."""
        hidden, weight, bias = leaves
        with torch.autocast(hidden.device.type, enabled=False):
            weight = self._padded(weight)
            bias = None if bias is None else self._padded(bias)
            # Accumulating in a narrow dtype would round once per chunk.
            wide = torch.promote_types(weight.dtype, torch.float32)
            hidden_wanted, weight_wanted, bias_wanted = (differentiate and wanted for wanted in self.wanted)
            to_hidden = torch.empty_like(hidden, dtype=self.dtype) if hidden_wanted else None
            sum_dtype = wide if len(self.chunks) > 1 else weight.dtype
            to_weight = torch.empty_like(weight, dtype=sum_dtype) if weight_wanted else None
            to_bias = weight.new_zeros(weight.shape[0], dtype=wide) if bias_wanted else None
            losses = torch.empty(hidden.shape[0], dtype=self.compute_dtype, device=hidden.device)
            for rows in self.chunks:
                part = hidden[rows].to(self.dtype)
                output = torch.mm(part, weight.t()) if bias is None else torch.addmm(bias, part, weight.t())
                factor = 1.0 if upstream is None else upstream[rows, None]
                losses[rows], gradient = self._chunk(rows, output, factor if differentiate else None)
                del output
                if to_hidden is not None:
                    torch.mm(gradient, weight, out=to_hidden[rows])
                if to_weight is not None:
                    add_product(to_weight, gradient.t(), part, first=rows.start == 0)
                if to_bias is not None:
                    to_bias += gradient.sum(dim=0, dtype=to_bias.dtype)
                del gradient  # before the next chunk's logits are allocated
            # Without padded classes.
            of_classes = [None if made is None else made[: self.classes] for made in (to_weight, to_bias)]
            return losses, [to_hidden, *of_classes] if differentiate else []

    def _padded(self, leaf: Tensor) -> Tensor:
        if not self.padding:
            return leaf.to(self.dtype)
        padded = leaf.new_zeros(self.classes + self.padding, *leaf.shape[1:], dtype=self.dtype)
        padded[: self.classes] = leaf
        return padded

    def _chunk(self, rows: slice, output: Tensor, upstream: Tensor | float | None) -> tuple[Tensor, Tensor]:
        """Return the losses, and the gradient of the head's output unless there is no upstream."""
        if self.by_kernel:
            assert isinstance(self.loss, _ClassLabels)
            mass = self.loss.mass[rows]
            losses = torch.empty(output.shape[0], dtype=self.compute_dtype, device=output.device)
            factor = None if upstream is None else torch.ones_like(mass) * upstream
            if not on_virtual_gpu(output.device):  # a virtual GPU has no values
                from tonnage.fit.layers.cross_entropy_kernel import losses_and_gradient_

                losses_and_gradient_(output, self.loss.label[rows], mass, factor, losses, self.classes)
            return losses, output
        # Without operations the logits are the output itself, unless the loss is computed in a narrower dtype.
        wider = torch.promote_types(output.dtype, self.compute_dtype) == self.compute_dtype
        logits = output if wider and not self.operations else output.to(self.compute_dtype)
        curves = []  # values that backward needs
        for name, number in self.operations:
            if name == "tanh":
                logits = logits.tanh()
                curves.append(logits)
            else:
                logits = logits * number if name == "mul" else logits / number
        if self.padding:
            logits[:, self.classes :] = -torch.inf  # no probability, so no gradient
        largest = logits.amax(dim=-1, keepdim=True).to(self.compute_dtype)
        exponentials = torch.sub(logits, largest).exp_()  # one pass widens and subtracts
        total = exponentials.sum(dim=-1, keepdim=True)
        losses = self.loss.losses(rows, logits, largest + total.log())
        if upstream is None:
            return losses, output
        # The head's output is no longer needed: without operations in between, its gradient replaces it.
        out = output if logits is output else exponentials
        gradient = self.loss.gradient(rows, exponentials, total, upstream, out)
        for name, number in reversed(self.operations):
            if name == "tanh":
                gradient = torch.ops.aten.tanh_backward(gradient, curves.pop())
            else:
                gradient = gradient.mul_(number) if name == "mul" else gradient.div_(number)
        return losses, gradient.to(self.dtype)


def _padding(head: Head, loss: CrossEntropy) -> int:
    """Return how many classes to add, so that each row of logits is aligned for tensor cores."""
    if head.hidden.device.type != "cuda" or loss.target.dim() > 1 or loss.label_smoothing:
        return 0
    return -head.weight.shape[0] % (_ALIGNED_BYTES // head.dtype.itemsize)


def add_product(total: Tensor, left: Tensor, right: Tensor, *, first: bool) -> None:
    """Compute `total += left @ right`, or `=` the first time; if possible without rounding the product first."""
    beta = 0 if first else 1
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, beta=beta, out=total)
    elif _sums_wide(left.device, left.dtype):
        torch.addmm(total, left, right, out_dtype=total.dtype, beta=beta, out=total)
    else:
        if first:
            total.zero_()
        for start in range(0, total.shape[0], _TILE_ROWS):
            total[start : start + _TILE_ROWS] += left[start : start + _TILE_ROWS] @ right


@cache
def _sums_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether this device accumulates a narrow product directly in FP32; tried once on a small matrix."""
    narrow = torch.ones(16, 16, dtype=dtype, device=device)
    total = torch.ones(16, 16, dtype=torch.float32, device=device)
    try:
        torch.addmm(total, narrow, narrow, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return True


def divide_rows(rows: int, row_bytes: int, chunk_bytes: int) -> tuple[slice, ...]:
    """Return chunks of at most these bytes, aligned for tensor cores; a single row may be larger."""
    most = max(1, chunk_bytes // row_bytes)
    if most > _ROWS_MULTIPLE:
        most -= most % _ROWS_MULTIPLE
    count = max(1, -(-rows // most))
    size = -(-rows // count)
    if most >= _ROWS_MULTIPLE:
        size = min(most, -(-size // _ROWS_MULTIPLE) * _ROWS_MULTIPLE)
    return tuple(slice(start, min(start + size, rows)) for start in range(0, max(rows, 1), max(size, 1)))
