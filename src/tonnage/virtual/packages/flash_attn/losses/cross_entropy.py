"""Cross entropy as a module."""

from typing import Any

from torch import Tensor, nn

from ..ops.triton.cross_entropy import cross_entropy_loss  # noqa: TID252 (its name here is flash_attn)


class CrossEntropyLoss(nn.Module):
    """Cross entropy of logits of shape (rows, classes), averaged over rows whose label is not ignored."""

    def __init__(
        self, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0, logit_scale: float = 1.0,
        lse_square_scale: float = 0.0, inplace_backward: bool = False, process_group: Any = None,
        return_z_loss: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise NotImplementedError(
                f"flash-attn's cross entropy has the reductions mean, sum and none, not {reduction!r}."
            )
        self.ignore_index, self.reduction, self.return_z_loss = ignore_index, reduction, return_z_loss
        self.label_smoothing, self.logit_scale, self.lse_square_scale = label_smoothing, logit_scale, lse_square_scale
        self.inplace_backward, self.process_group = inplace_backward, process_group

    def forward(self, input: Tensor, target: Tensor, precomputed_lse: Tensor | None = None) -> Any:
        losses = cross_entropy_loss(
            input, target, precomputed_lse, self.label_smoothing, self.logit_scale, self.lse_square_scale,
            self.ignore_index, self.inplace_backward, self.process_group,
        )  # fmt: skip
        if self.reduction == "sum":
            losses = tuple(each.sum() for each in losses)
        elif self.reduction == "mean":
            losses = tuple(each.sum() / (target != self.ignore_index).sum() for each in losses)
        loss, squares = losses
        return (loss, squares) if self.return_z_loss else loss
