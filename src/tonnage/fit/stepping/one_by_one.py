"""A stepper that steps parameters one by one after backward, and frees each gradient as it goes.

Temporaries are then those of one parameter. It does not know how a parameter is stepped.
"""

import torch
from torch import Tensor, nn

from tonnage.fit.stepping.parameter_step import parameter_steps
from tonnage.fit.stepping.stepper import Stepper, trained_parameters


class OneByOneStepper(Stepper):
    def __init__(self, before: Stepper) -> None:
        super().__init__(before.optimizer, clip_norm=before.clip_norm)
        self._steps = parameter_steps(before.optimizer)

    def finish(self) -> None:
        parameters = [p for p in trained_parameters(self.optimizer) if p.grad is not None]
        if self.clip_norm is not None and parameters:
            self.gradient_norm = gradient_norm([p.grad for p in parameters if p.grad is not None])
            nn.utils.clip_grads_with_norm_(parameters, self.clip_norm, self.gradient_norm)
        for parameter in parameters:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            self._steps.step(parameter, gradient)
        self._steps.finish()
        # No gradient is left: this only runs the step hooks and tells schedulers that a step was taken.
        self.optimizer.step()
        self._before.clear()


def gradient_norm(gradients: list[Tensor]) -> Tensor:
    """Return the total norm, summed in FP32: PyTorch's own norm of BF16 gradients has three digits."""
    wide = torch.promote_types(torch.float32, gradients[0].dtype)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0, dtype=wide)))
