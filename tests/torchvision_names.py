"""Import this before transformers or timm: a torchvision built for CUDA then loads beside a CPU torch.

It cannot load its compiled operators there and refuses to import; what imports it only needs their names. `make setup`
puts one that does not match torch into a folder of its own.
"""

import contextlib
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(sys.prefix) / "torchvision"))
with contextlib.suppress(ImportError, RuntimeError):
    import torchvision  # noqa: F401
if "torchvision" not in sys.modules:
    LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):
            LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
