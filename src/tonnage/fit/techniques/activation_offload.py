"""Activation offload: saved tensors of some blocks wait in pinned memory and return in time for backward.

It does not know which blocks are worth it: the last ones, whose backward starts at once, are not.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tonnage.fit.modules import replace_forward, why_not_blocks
from tonnage.fit.moving.host import PinnedSpace, Space, host_limit_bytes
from tonnage.fit.moving.saved_tensors import OffloadWindow, Packed, made_of_a_parameter, saved_by, storage_key
from tonnage.fit.technique import Technique
from tonnage.fit.training import Training
from tonnage.units import GIB, MIB


class ActivationOffload(Technique, name="activation-offload"):
    """Moves all saved tensors of each block, or its inputs alone, which is all that a recomputed block saves."""

    blocks: tuple[str, ...]
    what: Literal["kept", "inputs"] = "kept"
    minimum_bytes: int = MIB  # smaller storages stay on the GPU
    # Most bytes on the GPU in transit. Default: 1 GiB; for inputs, one storage at a time.
    window_bytes: int | None = None
    host_bytes: int | None = None  # most bytes to pin; default: all that is free

    def why_not(self, training: Training) -> str | None:
        return why_not_blocks(training.model, self.blocks)

    def place(self, training: Training, stack: ExitStack) -> None:
        space = PinnedSpace(training.device, host_limit_bytes(training.device, self.host_bytes))
        self.place_in(space, training, stack)

    def place_in(self, space: Space, training: Training, stack: ExitStack) -> None:
        """Offload to another place than pinned memory."""
        by_default = GIB if self.what == "kept" else 0  # one storage is always in transit
        window_bytes = by_default if self.window_bytes is None else self.window_bytes
        window = OffloadWindow(training.device, space, window_bytes=window_bytes)
        for name in self.blocks:
            block = training.model.get_submodule(name)
            stack.callback(replace_forward(block, self._offloading(block, window)))

    def _offloading(self, block: nn.Module, window: OffloadWindow) -> Callable[..., Any]:
        before = block.forward
        own = [*block.parameters(), *block.buffers()]

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return before(*args, **kwargs)
            leaves = tree_leaves((args, kwargs)) if self.what == "inputs" else ()
            inputs = {storage_key(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
            spared = {storage_key(tensor) for tensor in own}

            def pack(tensor: Tensor) -> Packed | None:
                key, large = storage_key(tensor), tensor.untyped_storage().nbytes() >= self.minimum_bytes
                moves = large and key not in spared and (self.what == "kept" or key in inputs)
                return window.pack(tensor) if moves and not made_of_a_parameter(tensor) else None

            with saved_by(pack):
                return before(*args, **kwargs)

        return forward
