"""Optimizer states in 8 bits an element instead of 32 or 16. What a step computes is FP32; what it leaves is coarser."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

from torch.optim import SGD, Adam

from tonnage.fit.measure.profile import Profile
from tonnage.fit.stepping.eight_bit import EightBitStep
from tonnage.fit.stepping.one_by_one import OneByOneStepper
from tonnage.fit.stepping.parameter_step import parameter_steps, why_not_in_pieces
from tonnage.fit.technique import Changes, Estimate, NotApplicable, Technique
from tonnage.fit.training import Training, Undo
from tonnage.units import format_bytes, percent


@dataclass(frozen=True, kw_only=True)
class EightBitStates(Technique):
    name: ClassVar[str] = "eight-bit-states"
    title: ClassVar[str] = "8-bit optimizer states"
    changes: ClassVar[Changes] = Changes.NUMERICS
    order: ClassVar[int] = 75
    conflicts: ClassVar[Mapping[str, str]] = {}

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

    def estimate(self, profile: Profile) -> Estimate:
        # A code takes a byte, its share of a scale 4 / block; FP32 states would save more, so BF16 is the safe guess.
        left = (1 + 4 / self.block) / 2
        saved = int(profile.optimizer_bytes * (1 - left))
        why = f"{percent(left, 0)} of {format_bytes(profile.optimizer_bytes)} of states are left, half of that if they are FP32"
        return Estimate(saved_bytes=saved, seconds=0.0, why=why)

    def apply(self, training: Training) -> Undo:
        reason = self.why_not(training)
        if reason is not None:
            raise NotApplicable(f"8-bit states cannot be used: {reason}.", hint="Use AdamW, or host-states.")
        steps = parameter_steps(training.optimizer)
        with ExitStack() as stack:
            stack.callback(steps.replace(EightBitStep(steps.function, self.block)))
            stack.callback(training.replace_stepper(OneByOneStepper(training.stepper)))
            return stack.pop_all().close
