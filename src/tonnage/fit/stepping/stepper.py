"""The plain step from gradients to new parameters, which techniques replace.

A step is `begin`, one `backward` per micro-batch, and `finish`; or `abandon` if anything raised.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def trained_parameters(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """Yield every parameter that the optimizer steps, in its order."""
    for group in optimizer.param_groups:
        yield from (parameter for parameter in group["params"] if parameter.requires_grad)


class Stepper:
    """Plain PyTorch: accumulate, clip by the global norm, step, drop the gradients."""

    accumulates = True  # several micro-batches per step are possible
    gradient_norm: Tensor | None = None  # of the last step, if gradients were clipped

    def __init__(self, optimizer: Optimizer, *, clip_norm: float | None = None) -> None:
        self.optimizer = optimizer
        self.clip_norm = clip_norm
        self._before: dict[nn.Parameter, Tensor | None] = {}

    def begin(self, micro_batches: int) -> None:
        self._before = {parameter: parameter.grad for parameter in trained_parameters(self.optimizer)}
        self.optimizer.zero_grad(set_to_none=True)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Run backward for one micro-batch, whose loss is already weighted; `last` marks the step's last one."""
        loss.backward()

    def finish(self) -> None:
        if self.clip_norm is not None:
            self.clip(self.clip_norm)
        self.update()
        self._before.clear()

    def clip(self, clip_norm: float) -> None:
        self.gradient_norm = nn.utils.clip_grad_norm_(trained_parameters(self.optimizer), clip_norm)

    def update(self) -> None:
        """Step with the accumulated gradients and drop them."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def abandon(self) -> None:
        """Restore the gradients from before `begin`."""
        for parameter, gradient in self._before.items():
            parameter.grad = gradient
        self._before.clear()
