"""Lets libraries with compiled parts for another build of torch import here: torchvision beside a CPU build.

A torchvision built for CUDA cannot load its operators next to a CPU torch, and then refuses to import, and with it half of
timm and transformers. Its operators are declared by name instead, so that everything but those few can be used.
"""

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_DECLARED = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[Any] = []


class _TorchvisionFinder(importlib.abc.MetaPathFinder):
    """Declares the missing operators just before torchvision's own code runs."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            if spec and spec.origin and not _loads(Path(spec.origin).parent):
                _declare()
        return None


def ease_imports() -> None:
    """From now on, `import torchvision` works."""
    if "torchvision" not in sys.modules and not any(isinstance(f, _TorchvisionFinder) for f in sys.meta_path):
        sys.meta_path.insert(0, _TorchvisionFinder())


def _loads(folder: Path) -> bool:
    try:
        for library in folder.glob("_C*.so"):
            ctypes.CDLL(str(library))
            return True
    except OSError:
        pass
    return False


def _declare() -> None:
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    _libraries.append(library)
    for schema in _DECLARED:
        library.define(schema)
