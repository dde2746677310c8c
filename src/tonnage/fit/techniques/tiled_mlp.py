"""Run feed-forward layers over slices of the sequence, so that their wide intermediates never exist whole.

Forward saves only the layer's input; backward runs it again, slice by slice. It pays from about 8 K tokens: below
that the gradients of one slice outweigh the savings. If the block around it is also recomputed, only the
intermediates of a slice are saved, and the layer runs forward three times unless the rerun skips what is not read.
"""

from contextlib import ExitStack
from typing import Any

from torch import nn

from tonnage.fit.layers.tiles import mixes_rows, sharded, tile_forward
from tonnage.fit.modules import active_dropout, find_blocks
from tonnage.fit.technique import Technique
from tonnage.fit.training import Training

NAMES = ("mlp", "ffn", "feed_forward", "feedforward", "ff")
_EXPERTS = ("experts", "router")


class TiledMlp(Technique, name="tiled-mlp"):
    """Cuts the rows (batch times sequence) into `tiles` slices."""

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
    """Return the feed-forward layers of a model's blocks by name."""
    return {
        f"{block_name}.{name}": child
        for block_name, block in find_blocks(model).items()
        for name, child in block.named_children()
        if name.lower() in NAMES and len(_linears(child)) >= 2
    }


def _linears(module: nn.Module) -> list[nn.Module]:
    """Return linear layers, including GPT-2's Conv1D, whose weight is transposed."""
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
    first: Any = _linears(mlp)[0]
    return mixes_rows(mlp, first.in_features if isinstance(first, nn.Linear) else first.weight.shape[0])
