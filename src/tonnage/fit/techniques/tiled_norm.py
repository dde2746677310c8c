"""Run norms over slices of the sequence: those written operator by operator, with FP32 copies in between.

transformers' RMS norms convert the sequence to FP32 and save several copies for backward; in slices those exist one
slice at a time, and only the input is saved. PyTorch's own LayerNorm and RMSNorm are one kernel and gain nothing.
"""

from contextlib import ExitStack
from typing import Any

from torch import nn

from tonnage.fit.layers.tiles import mixes_rows, sharded, tile_forward
from tonnage.fit.technique import Technique
from tonnage.fit.training import Training


class TiledNorm(Technique, name="tiled-norm"):
    """Cuts the rows (batch times sequence) into `tiles` slices."""

    tiles: int = 8

    def why_not(self, training: Training) -> str | None:
        if self.tiles < 2:
            return f"{self.tiles} tiles are the norm as it is; two are the fewest."
        found = find_norms(training.model)
        if not found:
            return "The model has no norm that is written out operator by operator; a fused one keeps nothing to save."
        for name, norm in found.items():
            if sharded(norm):
                return f"{name} is sharded over devices, whose wrapper would not see the gradients of its tiles."
            weight: Any = norm.weight
            reason = mixes_rows(norm, weight.shape[0])
            if reason:
                return f"{name} {reason}."
        return None

    def place(self, training: Training, stack: ExitStack) -> None:
        for module in find_norms(training.model).values():
            stack.callback(tile_forward(module, self.tiles))


def find_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Return the norms over the last dimension that are not a single kernel, by name."""
    found = {}
    for name, module in model.named_modules():
        one_kernel = isinstance(module, nn.LayerNorm | nn.RMSNorm)
        is_norm = type(module).__name__.endswith(("RMSNorm", "LayerNorm")) and not any(True for _ in module.children())
        weight = getattr(module, "weight", None)
        if is_norm and not one_kernel and weight is not None and weight.ndim == 1:
            found[name] = module
    return found
