"""Feed-forward layers over pieces of the sequence, so that their wide inside never exists whole.

Forward keeps the layer's input alone; backward runs it once more, piece by piece. It pays from about 8 K tokens up:
below that the gradients of one piece outweigh what is saved. It does not know whether the block around it is
recomputed; then only the inside of a piece is saved, and the layer runs three times forward in all unless the second
run leaves out what nobody reads.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from tonnage.fit.layers.tiles import mixes_rows, sharded, tile_forward
from tonnage.fit.modules import active_dropout, find_blocks
from tonnage.fit.technique import Technique
from tonnage.fit.training import Training

NAMES = ("mlp", "ffn", "feed_forward", "feedforward", "ff")
_EXPERTS = ("experts", "router")


@dataclass(frozen=True, kw_only=True)
class TiledMlp(Technique):
    """`tiles`: into how many pieces the rows (batch times sequence) are cut."""

    name: ClassVar[str] = "tiled-mlp"
    title: ClassVar[str] = "feed-forward in tiles"
    order: ClassVar[int] = 20
    hint: ClassVar[str] = "Leave tiled-mlp out; recompute saves the same bytes between blocks."

    tiles: int = 8

    def why_not(self, training: Training) -> str | None:
        if self.tiles < 2:
            return f"{self.tiles} tiles are the layer as it is; two are the fewest."
        found = find_feed_forwards(training.model)
        if not found:
            return f"No block has a feed-forward layer by name ({', '.join(NAMES)}) with two linear layers in it."
        return next((f"{name} {reason}." for name, mlp in found.items() if (reason := _obstacle(mlp))), None)

    def place(self, training: Training, stack: ExitStack) -> None:
        for module in find_feed_forwards(training.model).values():
            stack.callback(tile_forward(module, self.tiles))


def find_feed_forwards(model: nn.Module) -> dict[str, nn.Module]:
    """The feed-forward layers of a model's blocks by name."""
    return {
        f"{block_name}.{name}": child
        for block_name, block in find_blocks(model).items()
        for name, child in block.named_children()
        if name.lower() in NAMES and len(_linears(child)) >= 2
    }


def _linears(module: nn.Module) -> list[nn.Module]:
    """Linear layers, and those of transformers' GPT-2, which hold the weight the other way round."""
    return [child for child in module.modules() if isinstance(child, nn.Linear) or type(child).__name__ == "Conv1D"]


def _obstacle(mlp: nn.Module) -> str | None:
    if any(name.rpartition(".")[2] in _EXPERTS for name, _ in mlp.named_modules()):
        return "sends tokens to experts, and a tile would run all of them for few tokens each"
    dropped = active_dropout(mlp)
    if dropped:
        return f"drops at random ({dropped}), and a tile draws other numbers than its rows of the whole sequence"
    if any(parameter._backward_hooks for parameter in mlp.parameters()):
        return "has a hook on a parameter's gradient, which would run for each tile"
    if sharded(mlp):
        return "is sharded over devices, whose wrapper would not see the gradients of its tiles"
    first = _linears(mlp)[0]
    return mixes_rows(mlp, first.in_features if isinstance(first, nn.Linear) else first.weight.shape[0])
