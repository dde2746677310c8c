"""Activations on the host: what backward keeps in some blocks waits in pinned memory and is back in time.

It does not know which blocks are worth it: the last ones, whose backward begins at once, are not.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tonnage.fit.modules import replace_forward, why_not_blocks
from tonnage.fit.moving.host import PinnedPool, host_limit_bytes
from tonnage.fit.moving.saved_tensors import (
    Keeper,
    OffloadWindow,
    Packed,
    PinnedKeeper,
    made_of_a_parameter,
    saved_by,
    storage_key,
)
from tonnage.fit.technique import Technique
from tonnage.fit.training import Training
from tonnage.units import GIB, MIB


@dataclass(frozen=True, kw_only=True)
class ActivationOffload(Technique):
    """Moves all that backward keeps of each block; or its inputs alone, which are all that a recomputed block keeps."""

    name: ClassVar[str] = "activation-offload"
    title: ClassVar[str] = "activations on the host"
    order: ClassVar[int] = 50
    refusal: ClassVar[str] = "Activations cannot be moved to the host: {reason}."
    hint: ClassVar[str] = "Name blocks as `model.named_modules()` does, each once."

    blocks: tuple[str, ...]
    what: Literal["kept", "inputs"] = "kept"
    minimum_bytes: int = MIB  # smaller storages stay
    # On the GPU at most, on their way out or back: unless told 1 GiB, of inputs one at a time.
    window_bytes: int | None = None
    host_bytes: int | None = None  # to pin at most; all that is free unless told

    def why_not(self, training: Training) -> str | None:
        return why_not_blocks(training.model, self.blocks)

    def place(self, training: Training, stack: ExitStack) -> None:
        pool = PinnedPool(training.device, host_limit_bytes(training.device, self.host_bytes))
        self.place_with(PinnedKeeper(training.device, pool), training, stack)

    def place_with(self, keeper: Keeper, training: Training, stack: ExitStack) -> None:
        """Let the bytes wait somewhere else than in pinned memory."""
        window_bytes = self.window_bytes
        if window_bytes is None:
            window_bytes = GIB if self.what == "kept" else 0  # one storage is always on its way
        window = OffloadWindow(training.device, keeper, window_bytes=window_bytes)
        for name in self.blocks:
            block = training.model.get_submodule(name)
            stack.callback(replace_forward(block, self._offloading(block, window)))

    def _offloading(self, block: nn.Module, window: OffloadWindow) -> Callable[..., Any]:
        before = block.forward
        own = [*block.parameters(), *block.buffers()]

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return before(*args, **kwargs)
            inputs = None
            if self.what == "inputs":
                inputs = {storage_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            spared = {storage_key(tensor) for tensor in own}

            def pack(tensor: Tensor) -> Packed | None:
                key = storage_key(tensor)
                if tensor.untyped_storage().nbytes() < self.minimum_bytes or key in spared:
                    return None
                if (inputs is not None and key not in inputs) or made_of_a_parameter(tensor):
                    return None
                return window.pack(tensor)

            with saved_by(pack):
                return before(*args, **kwargs)

        return forward
