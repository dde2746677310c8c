"""Matrix products in a 16-bit dtype with FP32 parameters: `torch.autocast` around the forward pass.

Autocast's weight cache is off. It would hold a copy of every weight until the forward pass ends, even if a block is
recomputed; and a copy made without gradients (by tiled and sliced forwards) would be reused where gradients are
needed. Nothing is lost if each weight is used once per pass.
"""

from contextlib import ExitStack

import torch
from torch import Tensor

from tonnage.fit.stepping.stepper import Stepper, trained_parameters
from tonnage.fit.technique import NotApplicable, Technique
from tonnage.fit.training import Training
from tonnage.fit.virtual import on_virtual_gpu
from tonnage.techniques import techniques

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class ScaledStepper(Stepper):
    """Scales the loss so that FP16 can hold the gradients; skips steps whose gradients overflow."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device, *, clip_norm: float | None) -> None:
        super().__init__(optimizer, clip_norm=clip_norm)
        self.scaler = torch.amp.GradScaler(device.type)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        super().backward(self.scaler.scale(loss), last=last)

    def clip(self, clip_norm: float) -> None:
        self.scaler.unscale_(self.optimizer)
        super().clip(clip_norm)

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)


class Autocast(Technique, name="autocast"):
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise NotApplicable(f"Autocast to {self.dtype!r} was asked for.", hint=f"Choose of {', '.join(DTYPES)}.")
        if self.dtype == "float16":  # only FP16 needs its own stepper
            vars(self).update(techniques()["autocast"]["settings"]["float16"])

    def why_not(self, training: Training) -> str | None:
        kinds = {parameter.dtype for parameter in training.model.parameters() if parameter.is_floating_point()}
        if kinds and kinds <= set(DTYPES.values()):
            return f"every parameter is {' or '.join(sorted(map(str, kinds)))} already, and so is what they compute"
        if self.dtype == "bfloat16":
            device = training.device
            real = device.type == "cuda" and not on_virtual_gpu(device)
            if not real or torch.cuda.is_bf16_supported(including_emulation=False):
                return None
            name = torch.cuda.get_device_name(device)
            return f"{name} computes BF16 by emulation only; float16 is its half-size type"
        if torch.float16 in {parameter.dtype for parameter in trained_parameters(training.optimizer)}:
            return "some trained parameters are FP16, and the gradients of those cannot be scaled back"
        if type(training.stepper) is not Stepper:
            return f"FP16 needs its loss scaled, and {type(training.stepper).__name__} takes the step without"
        return None

    def place(self, training: Training, stack: ExitStack) -> None:
        device, dtype = training.device.type, DTYPES[self.dtype]
        stack.callback(training.around_forward(lambda: torch.autocast(device, dtype=dtype, cache_enabled=False)))
        if self.dtype == "float16":
            stepper = ScaledStepper(training.optimizer, training.device, clip_norm=training.stepper.clip_norm)
            stack.callback(training.replace_stepper(stepper))
