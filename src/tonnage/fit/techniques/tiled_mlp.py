"""Run feed-forward layers over slices of the sequence, so that their wide intermediates never exist whole.

Forward saves only the layer's input; backward runs it again, slice by slice. It pays from about 8 K tokens: below
that the gradients of one slice outweigh the savings. If the block around it is also recomputed, only the
intermediates of a slice are saved, and the layer runs forward three times unless the rerun skips what is not read.
"""

from typing import Any

from torch import nn

from tonnage.fit.layers.tiles import Tiling, mixes_rows
from tonnage.fit.modules import active_dropout, find_blocks

NAMES = ("mlp", "ffn", "feed_forward", "feedforward", "ff")
_EXPERTS = ("experts", "router")


class TiledMlp(Tiling, name="tiled-mlp"):
    kind = "layer"
    not_found = f"No block has a feed-forward layer by name ({', '.join(NAMES)}) with two linear layers in it."

    @staticmethod
    def find(model: nn.Module) -> dict[str, nn.Module]:
        """Return the feed-forward layers of a model's blocks by name."""
        return {
            f"{block_name}.{name}": child
            for block_name, block in find_blocks(model).items()
            for name, child in block.named_children()
            if name.lower() in NAMES and len(_linears(child)) >= 2
        }

    def obstacle(self, layer: Any) -> str | None:
        if any(name.rpartition(".")[2] in _EXPERTS for name, _ in layer.named_modules()):
            return "sends tokens to experts, and a tile would run all of them for few tokens each"
        dropped = active_dropout(layer)
        if dropped:
            return f"drops at random ({dropped}), and a tile draws other numbers than its rows of the whole sequence"
        if any(parameter._backward_hooks for parameter in layer.parameters()):
            return "has a hook on a parameter's gradient, which would run for each tile"
        first = _linears(layer)[0]
        return mixes_rows(layer, first.in_features if isinstance(first, nn.Linear) else first.weight.shape[0])


def _linears(module: nn.Module) -> list[Any]:
    """Return linear layers, including GPT-2's Conv1D, whose weight is transposed."""
    return [child for child in module.modules() if isinstance(child, nn.Linear) or type(child).__name__ == "Conv1D"]
