"""Optimizer states in 8 bits per element instead of 32 or 16. Steps compute in FP32; stored states are coarser."""

from contextlib import ExitStack

from torch.optim import SGD, Adam

from tonnage.fit.stepping.eight_bit import EightBitStep
from tonnage.fit.stepping.one_by_one import OneByOneStepper
from tonnage.fit.stepping.parameter_step import parameter_steps, why_not_in_pieces
from tonnage.fit.technique import NotApplicable, Technique
from tonnage.fit.training import Training


class EightBitStates(Technique, name="eight-bit-states"):
    block: int = 256  # elements that share a scale

    def __post_init__(self) -> None:
        if self.block not in (32, 64, 128, 256, 512, 1024, 2048):
            raise NotApplicable(
                f"Blocks of {self.block} elements were asked for.", hint="Choose a power of two from 32 to 2048."
            )

    def why_not(self, training: Training) -> str | None:
        optimizer = training.optimizer
        if not isinstance(optimizer, Adam | SGD):
            return f"its codes are made for Adam, AdamW and SGD, and this is {type(optimizer).__name__}"
        if isinstance(optimizer, SGD) and not any(group["momentum"] for group in optimizer.param_groups):
            return "SGD without momentum keeps no states"
        if any(group.get("differentiable") for group in optimizer.param_groups):
            return f"{type(optimizer).__name__} was made with differentiable=True, and rounding has no derivative"
        return why_not_in_pieces(optimizer)

    def place(self, training: Training, stack: ExitStack) -> None:
        steps = parameter_steps(training.optimizer)
        stack.callback(steps.replace(EightBitStep(steps.function, self.block)))
        stack.callback(training.replace_stepper(OneByOneStepper(training.stepper)))
