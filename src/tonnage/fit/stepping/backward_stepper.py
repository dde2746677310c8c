"""A stepper that steps each parameter as soon as its gradient is complete, during backward.

Small parameters wait and are stepped together: each step costs host time, which may exceed the GPU time. It does not
know how a parameter is stepped; outside a step, backward passes behave as usual.
"""

from contextlib import ExitStack
from weakref import WeakMethod

from torch import Tensor, nn

from tonnage.errors import TonnageError
from tonnage.fit.stepping.parameter_step import OneByOneStepper, is_small
from tonnage.fit.stepping.stepper import Stepper, trained_parameters


class BackwardBroken(TonnageError, RuntimeError):
    """Backward raised after some parameters were stepped: those keep their new values, the others their old ones."""


class BackwardStepper(OneByOneStepper):
    """Steps in the backward pass of the last micro-batch, or after it if gradients are clipped."""

    def __init__(self, model: nn.Module, before: Stepper) -> None:
        super().__init__(before)
        self._model = model
        self._largest = max((parameter.numel() for parameter in trained_parameters(before.optimizer)), default=0)
        self._stepped: set[nn.Parameter] = set()
        self._in_backward = False
        self._last = False

    def hook_parameters(self, stack: ExitStack) -> None:
        # The garbage collector cannot see through parameter hooks: a strong reference would leak the model.
        method = WeakMethod(self._gradient_is_there)

        def hook(parameter: nn.Parameter) -> None:
            if (alive := method()) is not None:
                alive(parameter)

        for parameter in trained_parameters(self.optimizer):
            stack.callback(parameter.register_post_accumulate_grad_hook(hook).remove)

    def begin(self, micro_batches: int) -> None:
        super().begin(micro_batches)
        self._stepped.clear()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self._in_backward, self._last = True, last
        try:
            super().backward(loss, last=last)
        except Exception as error:
            if not self._stepped:
                raise
            names = [name for name, parameter in self._model.named_parameters() if parameter in self._stepped]
            count = sum(1 for _ in trained_parameters(self.optimizer))
            shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
            words = f"Backward raised when {len(self._stepped)} of {count} parameters were already stepped: {shown}."
            raise BackwardBroken(words, hint="Go back to a checkpoint.") from error
        finally:
            self._in_backward = False

    def abandon(self) -> None:
        self.steps.finish()
        super().abandon()

    def step_gradients(self) -> None:
        """Step small and clipped parameters, and those whose gradient a sharding wrapper set without autograd."""
        rest = self.with_gradients()
        small = [parameter for parameter in rest if is_small(parameter, self._largest)]
        self.steps.step_all(small)
        self._stepped.update(small)
        for parameter in rest:
            if parameter not in self._stepped:
                self.step(parameter)

    def gradient_is_there(self, parameter: nn.Parameter, *, last: bool) -> None:
        """Handle a micro-batch's gradient that was accumulated into `parameter.grad`."""
        if last and self.clip_norm is None and not is_small(parameter, self._largest):
            self.step(parameter)

    def step(self, parameter: nn.Parameter) -> None:
        super().step(parameter)
        self._stepped.add(parameter)

    def _gradient_is_there(self, parameter: nn.Parameter) -> None:
        # Autograd also calls this for a parameter that got no gradient.
        if not self._in_backward or parameter.grad is None:
            return
        if parameter in self._stepped:
            raise RuntimeError(
                "A parameter got gradients twice in one backward pass: checkpointing with use_reentrant=True does that "
                "to shared parameters."
            )
        self.gradient_is_there(parameter, last=self._last)
