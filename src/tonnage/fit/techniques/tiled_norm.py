"""Run norms over slices of the sequence: those written operator by operator, with FP32 copies in between.

transformers' RMS norms convert the sequence to FP32 and save several copies for backward; in slices those exist one
slice at a time, and only the input is saved. PyTorch's own LayerNorm and RMSNorm are one kernel and gain nothing.
"""

from typing import Any

from torch import nn

from tonnage.fit.layers.tiles import Tiling, mixes_rows


class TiledNorm(Tiling, name="tiled-norm"):
    kind = "norm"
    not_found = "The model has no norm that is written out operator by operator; a fused one keeps nothing to save."

    @staticmethod
    def find(model: nn.Module) -> dict[str, nn.Module]:
        """Return the norms over the last dimension that are not a single kernel, by name."""
        found = {}
        for name, module in model.named_modules():
            fused = isinstance(module, nn.LayerNorm | nn.RMSNorm) or any(True for _ in module.children())
            is_norm = type(module).__name__.endswith(("RMSNorm", "LayerNorm"))
            if is_norm and not fused and getattr(getattr(module, "weight", None), "ndim", 0) == 1:
                found[name] = module
        return found

    def obstacle(self, layer: Any) -> str | None:
        return mixes_rows(layer, layer.weight.shape[0])
