"""Norms over pieces of the sequence: those written out operator by operator, with copies in FP32 in between.

transformers' RMS norms take the sequence to FP32 and keep several copies of it for backward; in pieces those exist for
a piece at a time, and only the input is kept. PyTorch's own LayerNorm and RMSNorm are one kernel and gain nothing: they
are left alone.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from tonnage.fit.layers.tiles import mixes_rows, sharded, tile_all
from tonnage.fit.measure.profile import OperatorProfile, Profile
from tonnage.fit.technique import Estimate, NotApplicable, Technique
from tonnage.fit.training import Training, Undo
from tonnage.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class TiledNorm(Technique):
    """`tiles`: into how many pieces the rows (batch times sequence) are cut."""

    name: ClassVar[str] = "tiled-norm"
    title: ClassVar[str] = "norms in tiles"
    order: ClassVar[int] = 20
    conflicts: ClassVar[dict[str, str]] = {
        "compile": "compiled blocks fuse their norms, and a tiled one would break them"
    }

    tiles: int = 8

    def why_not(self, training: Training) -> str | None:
        if self.tiles < 2:
            return f"{self.tiles} tiles are the norm as it is; two are the fewest."
        found = find_norms(training.model)
        if not found:
            return "The model has no norm that is written out operator by operator; a fused one keeps nothing to save."
        return next((f"{name} {reason}." for name, norm in found.items() if (reason := _obstacle(norm))), None)

    def estimate(self, profile: Profile) -> Estimate:
        inside = [operator for block in profile.blocks for operator in block.operators if _in_norm(operator)]
        kept_bytes = sum(operator.kept_bytes for operator in inside)
        largest_bytes = max((operator.output_bytes for operator in inside), default=0)
        transient_bytes = round(largest_bytes * (1 - 1 / self.tiles))
        why = f"{format_bytes(kept_bytes)} inside norms not kept; one more forward of them"
        return Estimate(
            saved_bytes=kept_bytes + transient_bytes, seconds=sum(operator.seconds for operator in inside), why=why
        )

    def apply(self, training: Training) -> Undo:
        reason = self.why_not(training)
        if reason:
            raise NotApplicable(reason, hint="Leave tiled-norm out.")
        return tile_all(list(find_norms(training.model).values()), self.tiles)


def find_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Norms over the last dimension that are no single kernel, by name."""
    return {name: module for name, module in model.named_modules() if _is_written_out(module)}


def _is_written_out(module: nn.Module) -> bool:
    if isinstance(module, nn.LayerNorm | nn.RMSNorm) or any(True for _ in module.children()):
        return False
    weight = getattr(module, "weight", None)
    return type(module).__name__.endswith(("RMSNorm", "LayerNorm")) and weight is not None and weight.ndim == 1


def _obstacle(norm: nn.Module) -> str | None:
    if sharded(norm):
        return "is sharded over devices, whose wrapper would not see the gradients of its tiles"
    return mixes_rows(norm, norm.weight.shape[0])


def _in_norm(operator: OperatorProfile) -> bool:
    return "norm" in operator.module.lower() and "layer_norm" not in operator.name and "rms_norm" not in operator.name
