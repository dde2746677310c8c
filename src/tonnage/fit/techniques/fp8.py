"""Run the large linear layers of the blocks in FP8: faster on GPUs that support it, without saving memory.

Parameters stay as they are.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from types import MethodType

import torch
from torch import Tensor, nn

from tonnage.fit.layers.fp8_matmul import MULTIPLE, fp8_linear
from tonnage.fit.modules import find_blocks, replace_forward
from tonnage.fit.technique import Technique
from tonnage.fit.training import Training, Undo

_CAPABILITY = (8, 9)  # Ada; Hopper and Blackwell after it


class Fp8Linear(Technique, name="fp8"):
    minimum_width: int = 1024  # of both sides of a layer: below it, quantization costs more than the product saves

    def why_not(self, training: Training) -> str | None:
        device = training.device
        if device.type != "cuda":
            return f"the model is on the {device.type.upper()}, and FP8 products need a GPU with FP8 tensor cores"
        capability = torch.cuda.get_device_capability(device)
        if capability < _CAPABILITY:
            name, has = torch.cuda.get_device_name(device), ".".join(map(str, capability))
            return f"{name} has no FP8 tensor cores (compute capability {has}; they came with 8.9)"
        if not any(True for _ in self._layers(training.model)):
            return (
                f"no linear layer of its blocks is {self.minimum_width} wide on both sides with both widths "
                f"multiples of {MULTIPLE}"
            )
        return None

    def place(self, training: Training, stack: ExitStack) -> None:
        for layer in self._layers(training.model):
            stack.callback(run_in_fp8(layer))

    def _layers(self, model: nn.Module) -> Iterator[nn.Linear]:
        for module in dict.fromkeys(child for block in find_blocks(model).values() for child in block.modules()):
            if type(module) is nn.Linear:
                widths = (module.in_features, module.out_features)
                if min(widths) >= self.minimum_width and not any(width % MULTIPLE for width in widths):
                    yield module


def run_in_fp8(layer: nn.Linear) -> Undo:
    """Make one layer compute in FP8. An earlier replacement of its forward is bypassed meanwhile."""
    # A method, not a closure: layers share one function, so the compiler need not recompile for each.
    return replace_forward(layer, MethodType(_forward, layer))


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return fp8_linear(x, layer.weight, layer.bias)


_forward.__name__ = "forward"  # so that a pickled module gets its plain forward back
