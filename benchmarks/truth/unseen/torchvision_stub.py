"""Let torchvision and timm import beside a PyTorch build that lacks torchvision's compiled operators."""

import torch

try:
    import torchvision  # noqa: F401
except RuntimeError:
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision  # noqa: F401
