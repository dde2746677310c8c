"""The loss in chunks: LM head and cross-entropy without ever holding all logits.

The head returns deferred logits (`tonnage.fit.layers.deferred_logits`), which any loss then evaluates in chunks.
"""

from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tonnage.fit.layers.deferred_logits import defer
from tonnage.fit.modules import find_blocks, replace_forward
from tonnage.fit.technique import Technique
from tonnage.fit.training import Training


class ChunkedLoss(Technique, name="chunked-loss"):
    """Computes logits in chunks; `head` names the linear layer over the vocabulary (empty: detected)."""

    chunk_bytes: int = 512 << 20  # of logits, in the dtype of the head's output
    head: str = ""

    def why_not(self, training: Training) -> str | None:
        if self.chunk_bytes < 1:
            return f"chunk_bytes={self.chunk_bytes}: a chunk has at least one byte."
        name, head = self._find(training.model)
        if head is None and self.head:
            return f"The model has no module {self.head!r}."
        if head is None:
            return "No linear layer over a vocabulary was found: nothing that logits could be saved of."
        if type(head) is not nn.Linear:
            return f"The head {name!r} is a {type(head).__name__}, not a plain nn.Linear: its forward is its own."
        if "forward" in head.__dict__:
            return f"The head {name!r} has a forward of its own already, which chunks would pass by."
        if head._backward_hooks or head._backward_pre_hooks:
            return f"The head {name!r} has backward hooks, which would need its whole output."
        kind = type(head.weight.data)
        if kind not in (Tensor, DTensor):  # FSDP2 gathers it while the model runs
            return f"The head {name!r} holds its weight as {kind.__name__}, which cannot be read in chunks."
        return None

    def _find(self, model: nn.Module) -> tuple[str, nn.Module | None]:
        """Return the head's name and module, if there is one."""
        modules = dict(model.named_modules())
        found = modules.get(self.head) if self.head else find_head(model)
        return next((name for name, module in modules.items() if module is found), self.head), found

    def place(self, training: Training, stack: ExitStack) -> None:
        _, head = self._find(training.model)
        assert isinstance(head, nn.Linear)
        plain = head.forward

        def forward(input: Tensor) -> Tensor:
            mixed = input.dtype != head.weight.dtype and not torch.is_autocast_enabled(input.device.type)
            # torch.compile needs plain tensors; for mixed dtypes the plain layer raises its own error.
            if torch.compiler.is_compiling() or mixed or input.dim() < 2:
                return plain(input)
            return defer(input, head.weight, head.bias, chunk_bytes=self.chunk_bytes)

        stack.callback(replace_forward(head, forward))


def find_head(model: nn.Module) -> nn.Module | None:
    """Return the output embedding of a transformers model; else the widest linear layer after the blocks."""
    named = getattr(model, "get_output_embeddings", None)
    found = named() if named is not None else None
    if isinstance(found, nn.Module):
        return found
    blocks = tuple(f"{name}." for name in find_blocks(model))
    modules = list(model.named_modules())
    last = max((place for place, (name, _) in enumerate(modules) if name.startswith(blocks)), default=-1)
    linears = [module for _, module in modules[last + 1 :] if isinstance(module, nn.Linear)]
    wider = [linear for linear in linears if linear.out_features > linear.in_features]
    return max(wider, key=lambda linear: linear.out_features, default=None)
