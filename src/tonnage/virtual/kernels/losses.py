"""Losses: some reduce into a tensor that keeps the storage of all elements, others allocate the elements separately."""

from typing import Any

import torch
from torch import Tensor

from tonnage.virtual.kernels.registry import free_reversed, kernel
from tonnage.virtual.kernels.values import forget

Tensors = tuple[Tensor, Tensor]
NONE, MEAN, SUM = 0, 1, 2


def _reduced(loss: Tensor, reduction: int) -> Tensor:
    return loss.mean() if reduction == MEAN else loss.sum() if reduction == SUM else loss


def _pairwise(self: Tensor, target: Tensor) -> Tensor:
    if self.shape == target.shape and self.dtype == target.dtype and self.stride() == target.stride():
        return torch.empty_like(self)
    return torch.sub(self, target)


@kernel("mse_loss", "smooth_l1_loss")
def elementwise_loss(self: Tensor, target: Tensor, reduction: int = MEAN, *_: float) -> Tensor:
    """Allocate the result for all elements and shrink it before they are reduced into it."""
    result = _pairwise(self, target)
    if reduction == NONE:
        return result
    result.resize_(())
    loss = _pairwise(self, target)
    (torch.mean if reduction == MEAN else torch.sum)(loss, dim=[], out=result)
    return result


@kernel("huber_loss")
def huber_loss(self: Tensor, target: Tensor, reduction: int = MEAN, delta: float = 1.0) -> Tensor:
    return _reduced(_pairwise(self, target), reduction)


@kernel("smooth_l1_loss_backward.grad_input", "huber_loss_backward.out")
def elementwise_loss_backward(*_: Any, grad_input: Tensor) -> Tensor:
    return forget(grad_input)


@kernel("binary_cross_entropy")
def binary_cross_entropy(self: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = MEAN) -> Tensor:
    """Copy the reduced loss over the first of all losses."""
    loss = torch.empty_like(self)
    if reduction == NONE:
        return loss
    reduced = _reduced(loss, reduction)
    return loss.resize_(reduced.shape).copy_(reduced)


@kernel("multi_margin_loss")
def multi_margin_loss(
    self: Tensor, target: Tensor, p: float = 1, margin: float = 1, weight: Any = None, reduction: int = MEAN
) -> Tensor:
    if reduction == NONE:
        return self.new_empty((self.shape[0] if self.dim() > 1 else 1,) if target.dim() else ())
    result = self.new_empty(())
    if self.dim() > 1:
        torch.sum(self.new_empty((self.shape[0],)), dim=[0], out=result)
    return result


@kernel("multi_margin_loss_backward", "multilabel_margin_loss_backward")
def margin_loss_backward(grad_output: Tensor, self: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(self, memory_format=torch.contiguous_format)


@kernel("multilabel_margin_loss_forward")
def multilabel_margin_loss(self: Tensor, target: Tensor, reduction: int) -> Tensors:
    """Compute a loss for each row and a flag for each target class, then the sum."""
    is_target = self.new_empty(target.shape)
    if reduction == NONE or self.dim() < 2:
        return self.new_empty(self.shape[:-1]), is_target
    losses, result = self.new_empty((self.shape[0],)), self.new_empty(())
    return torch.sum(losses, dim=[0], out=result), is_target


@kernel("_use_cudnn_ctc_loss", "_use_cudnn_ctc_loss.Tensor", "_use_miopen_ctc_loss", "_use_miopen_ctc_loss.Tensor")
def use_cudnn_ctc_loss(*arguments: object) -> bool:
    """Return False: cuDNN requires 32-bit targets on the host, which PyTorch then rejects."""
    return False


@kernel("_ctc_loss", "_ctc_loss.Tensor")
def ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: object, target_lengths: list[int] | Tensor, *_: Any
) -> Tensors:  # fmt: skip
    if targets.dim() == 1:
        longest = max(target_lengths if isinstance(target_lengths, list) else target_lengths.cpu().tolist())
    else:
        longest = targets.shape[1]
    batch = log_probs.shape[1]
    lengths, inputs, offsets = (torch.empty(batch, dtype=torch.int64, device=targets.device) for _ in range(3))
    alpha = log_probs.new_empty((batch, log_probs.shape[0], 2 * longest + 1))
    losses = log_probs.new_empty((batch,))
    del inputs, lengths, offsets
    return losses, alpha


@kernel("_ctc_loss_backward", "_ctc_loss_backward.Tensor")
def ctc_loss_backward(
    grad: Tensor, log_probs: Tensor, targets: Tensor, input_lengths: object, target_lengths: object,
    neg_log_likelihood: Tensor, log_alpha: Tensor, *_: Any,
) -> Tensor:  # fmt: skip
    batch = log_probs.shape[1]
    lengths, inputs, offsets = (torch.empty(batch, dtype=torch.int64, device=targets.device) for _ in range(3))
    beta = torch.empty_like(log_alpha)
    result = torch.empty_like(log_probs, memory_format=torch.contiguous_format)
    del beta, inputs, lengths, offsets
    return result


@kernel("_cdist_backward")
def cdist_backward(grad: Tensor, x1: Tensor, x2: Tensor, p: float, cdist: Tensor) -> Tensor:
    """Allocate a gradient for each pair, before they are summed."""
    batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    x1, x2 = (x.expand(*batch, *x.shape[-2:]).contiguous() for x in (x1, x2))
    held = [cdist.contiguous(), grad.contiguous()]
    result = x1.new_empty(x1.shape)
    pairs = x1.new_empty((x2.shape[-2], *x1.shape)) if result.numel() else None
    del pairs, held
    return result


@kernel("_pdist_backward")
def pdist_backward(grad: Tensor, self: Tensor, p: float, pdist: Tensor) -> Tensor:
    """Allocate a gradient for each pair within one set, before they are summed."""
    result = torch.empty_like(self, memory_format=torch.contiguous_format)
    pairs = self.new_empty((self.shape[0] - 1, *result.shape)) if p and self.numel() else None
    del pairs
    return result


@kernel("nll_loss2d_forward")
def nll_loss2d_forward(self: Tensor, target: Tensor, weight: Any, reduction: int, *_: int) -> Tensors:
    total_weight = self.new_empty(())
    output = self.new_empty((self.shape[0], *self.shape[2:]) if reduction == NONE else ())
    if reduction != NONE:
        free_reversed([self.contiguous(), target.contiguous()])
    return output, total_weight
