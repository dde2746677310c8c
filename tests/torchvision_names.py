"""Import this before transformers or timm: a torchvision built for CUDA then loads beside a CPU torch.

It cannot load its compiled operators there and refuses to import; what imports it only needs their names.
"""

import contextlib
import sys

import torch

with contextlib.suppress(ImportError, RuntimeError):
    import torchvision  # noqa: F401
if "torchvision" not in sys.modules:
    LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):
            LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
