"""The optimizer step inside backward: each parameter is stepped as soon as its gradient is complete.

The gradient is then freed, so that gradients never all exist at once. It does not know how a parameter is stepped.
"""

from contextlib import ExitStack

from torch.nn.parallel import DistributedDataParallel

from tonnage.fit.stepping.backward_stepper import BackwardStepper
from tonnage.fit.stepping.parameter_step import why_not_one_by_one
from tonnage.fit.technique import NotApplicable, Technique
from tonnage.fit.training import Training


class OneBackwardStepper(BackwardStepper):
    """Frees each gradient after its step, so gradients can neither accumulate nor be clipped."""

    accumulates = False

    def begin(self, micro_batches: int) -> None:
        if micro_batches > 1:
            raise NotApplicable(
                f"{micro_batches} micro-batches were asked for, but the first one's gradients are stepped and gone.",
                hint="Take step-in-backward away, or use one micro-batch.",
            )
        super().begin(micro_batches)


class StepInBackward(Technique, name="step-in-backward"):
    def why_not(self, training: Training) -> str | None:
        if training.stepper.clip_norm is not None:
            return "clipping needs the norm of all gradients before the first parameter is stepped"
        if training.micro_batches > 1:
            return f"a step accumulates {training.micro_batches} micro-batches, and a stepped gradient cannot grow"
        if any(isinstance(module, DistributedDataParallel) for module in training.model.modules()):
            return "DistributedDataParallel averages gradients after they would have been stepped"
        return why_not_one_by_one(training.optimizer)

    def place(self, training: Training, stack: ExitStack) -> None:
        stepper = OneBackwardStepper(training.model, training.stepper)
        stepper.hook_parameters(stack)
        stack.callback(training.replace_stepper(stepper))
