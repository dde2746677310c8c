"""Cross entropy that keeps the logits: it allocates only numbers per row, and one gradient, or none in place."""

from typing import Any

import torch
from torch import Tensor


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, precomputed: Tensor | None, in_place: bool, group: Any
    ) -> Any:
        if group is not None and torch.distributed.get_world_size(group) > 1:
            raise NotImplementedError(
                "The stand-in of flash-attn has no cross entropy over a vocabulary that is split."
            )
        logits = logits if logits.stride(-1) == 1 else logits.contiguous()
        losses, sums, squares = (torch.empty(len(logits), device=logits.device) for _ in range(3))
        ctx.save_for_backward(logits, sums if precomputed is None else precomputed.contiguous(), labels)
        ctx.mark_non_differentiable(squares)
        ctx.in_place = in_place
        return losses, squares

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        logits = ctx.saved_tensors[0]
        return logits if ctx.in_place else torch.empty_like(logits), None, None, None, None


def cross_entropy_loss(
    logits: Tensor, labels: Tensor, precomputed_lse: Tensor | None = None, label_smoothing: float = 0.0,
    logit_scale: float = 1.0, lse_square_scale: float = 0.0, ignore_index: int = -100, inplace_backward: bool = False,
    process_group: Any = None,
) -> Any:  # fmt: skip
    """Return the losses and z-losses per row."""
    usable = precomputed_lse if logit_scale == 1.0 and not label_smoothing else None
    return _CrossEntropy.apply(logits, labels, usable, inplace_backward, process_group)
