"""What tests look at while something runs, and how they keep the plain model as exact as they ask."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """The most elements that the storage of any new tensor had."""

    elements = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


@pytest.fixture
def softmax_in_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager attention of transformers makes its softmax in FP32, whatever the model's type; not so here."""
    monkeypatch.setattr(nn.functional, "softmax", lambda scores, dim, dtype=None: torch.softmax(scores, dim))
