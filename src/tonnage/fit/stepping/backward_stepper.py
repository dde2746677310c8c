"""A stepper that steps each parameter as soon as its gradient is complete, while backward goes on.

Small ones wait until its end and are stepped together: each step takes the host's time, which may be longer than the card's.
It does not know how a parameter is stepped; between steps, a backward pass only makes gradients as ever.
"""

from contextlib import ExitStack
from weakref import WeakMethod

from torch import Tensor, nn

from tonnage.errors import TonnageError
from tonnage.fit.stepping.parameter_step import is_small, parameter_steps
from tonnage.fit.stepping.stepper import Stepper, trained_parameters
from tonnage.fit.training import Undo


class BackwardBroken(TonnageError, RuntimeError):
    """Backward raised after some parameters were stepped: they keep their new values, the others their old ones."""


class BackwardStepper(Stepper):
    """Steps in the backward pass of the last micro-batch; where gradients are clipped, after it."""

    def __init__(self, model: nn.Module, before: Stepper) -> None:
        super().__init__(before.optimizer, clip_norm=before.clip_norm)
        self._model = model
        self.steps = parameter_steps(before.optimizer)
        self._largest = max((parameter.numel() for parameter in trained_parameters(before.optimizer)), default=0)
        self._stepped: set[nn.Parameter] = set()
        self._in_backward = False
        self._last = False

    def hook_parameters(self) -> Undo:
        # The garbage collector does not see through a parameter's hooks: one that held us would hold the model for ever.
        method = WeakMethod(self._gradient_is_there)

        def hook(parameter: nn.Parameter) -> None:
            if (alive := method()) is not None:
                alive(parameter)

        with ExitStack() as stack:
            for parameter in trained_parameters(self.optimizer):
                stack.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
            return stack.pop_all().close

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

    def finish(self) -> None:
        if self.clip_norm is not None:
            self.clip(self.clip_norm)
        self.step_the_rest()
        self.steps.finish()
        # No gradient is left: this only calls the step's hooks and tells schedulers that a step was taken.
        self.optimizer.step()
        self._before.clear()

    def abandon(self) -> None:
        self.steps.finish()
        super().abandon()

    def clip(self, clip_norm: float) -> None:
        self.gradient_norm = nn.utils.clip_grad_norm_(trained_parameters(self.optimizer), clip_norm)

    def step_the_rest(self) -> None:
        """Small ones together; clipped ones, and those that a sharding wrapper set past autograd's accumulation."""
        rest = [parameter for parameter in trained_parameters(self.optimizer) if parameter.grad is not None]
        small = [parameter for parameter in rest if is_small(parameter, self._largest)]
        if small:
            self.steps.step_all(small)
            self._stepped.update(small)
        for parameter in rest:
            if parameter not in self._stepped:
                self.step(parameter)

    def gradient_is_there(self, parameter: nn.Parameter, *, last: bool) -> None:
        """A micro-batch's gradient was added to what the parameter had."""
        if last and self.clip_norm is None and not is_small(parameter, self._largest):
            self.step(parameter)

    def step(self, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        assert gradient is not None
        parameter.grad = None
        self.steps.step(parameter, gradient)
        self._stepped.add(parameter)

    def _gradient_is_there(self, parameter: nn.Parameter) -> None:
        # Autograd also calls for a parameter that its last function took and gave no gradient.
        if not self._in_backward or parameter.grad is None:
            return
        if parameter in self._stepped:
            raise RuntimeError(
                "A parameter got gradients twice in one backward pass: checkpointing with use_reentrant=True does that "
                "to shared parameters."
            )
        self.gradient_is_there(parameter, last=self._last)
