"""Parameters of every part, and of its pieces that offloading moves: src/tonnage/budget/data/diffusion/weights.json.

| key         | parameters of                                                             |
|-------------|---------------------------------------------------------------------------|
| parameters  | the whole part                                                            |
| linear      | its linear layers, which quantisation narrows                             |
| widest      | the largest linear layer, which is widened as it is used                  |
| leaf        | the largest module without children, as sequential offloading moves them  |
| block       | the largest of its lists of blocks, as group offloading moves them        |
| outside     | all that is in no such list                                               |

`like` names a part whose passes hold and launch the same.
"""

import json
from pathlib import Path

import torch
from modules import PARTS, build

LIKE = {"flux-schnell": "flux-dev", "clip-l-projected": "clip-l"}
DATA = Path(__file__).parents[2] / "src/tonnage/budget/data/diffusion/weights.json"


def size(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def counted(module: torch.nn.Module) -> dict[str, int]:
    linear = [size(each) for each in module.modules() if isinstance(each, torch.nn.Linear)]
    blocks = [size(block) for child in module.children() if isinstance(child, torch.nn.ModuleList) for block in child]
    leaves = [sum(p.numel() for p in each.parameters(recurse=False)) for each in module.modules()]
    whole = size(module)
    return {
        "parameters": whole, "linear": sum(linear), "widest": max(linear, default=0), "leaf": max(leaves),
        "block": max(blocks, default=whole), "outside": whole - sum(blocks) if blocks else 0,
    }  # fmt: skip


if __name__ == "__main__":
    found = {name: {**counted(build(name, torch.bfloat16, "meta")), "like": LIKE.get(name, name)} for name in PARTS}
    DATA.write_text("{\n" + ",\n".join(f' "{name}": {json.dumps(row)}' for name, row in found.items()) + "\n}\n")
