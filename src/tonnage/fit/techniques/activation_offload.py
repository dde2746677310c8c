"""Activations on the host: what backward keeps in some blocks waits in pinned memory and is back in time.

It does not know which blocks are worth it: the last ones, whose backward begins at once, are not.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tonnage.fit.block_names import why_not_blocks
from tonnage.fit.measure.profile import BlockProfile, Profile
from tonnage.fit.modules import replace_forward
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
from tonnage.fit.technique import Estimate, NotApplicable, Technique
from tonnage.fit.training import Training, Undo
from tonnage.units import GIB, MIB, format_bytes


@dataclass(frozen=True, kw_only=True)
class ActivationOffload(Technique):
    """Of each block, all that backward keeps; or its inputs alone, which are all that a recomputed block keeps."""

    name: ClassVar[str] = "activation-offload"
    title: ClassVar[str] = "activations on the host"
    order: ClassVar[int] = 50

    blocks: tuple[str, ...]
    what: Literal["kept", "inputs"] = "kept"
    minimum_bytes: int = MIB  # smaller storages stay
    # On the GPU at most, on their way out or back: unless told 1 GiB, of inputs one at a time.
    window_bytes: int | None = None
    host_bytes: int | None = None  # to pin at most; all that is free unless told

    def why_not(self, training: Training) -> str | None:
        return why_not_blocks(training.model, self.blocks)

    def estimate(self, profile: Profile) -> Estimate:
        blocks = [block for block in profile.blocks if block.name in self.blocks]
        moved_bytes = sum(self._moved_bytes(block) for block in blocks)
        window_bytes = max([self._window_bytes, *(block.input_bytes for block in blocks)])
        staying_bytes = min(window_bytes, moved_bytes)
        stalled_s = self._stalled_forward_s(profile, window_bytes) + self._stalled_backward_s(profile, window_bytes)
        micro_batches = math.ceil(profile.batch_rows / profile.micro_batch_rows)
        return Estimate(
            saved_bytes=moved_bytes - staying_bytes,
            seconds=stalled_s * micro_batches,
            host_bytes=moved_bytes,
            pinned_bytes=moved_bytes,
            why=f"{len(blocks)} blocks move {format_bytes(moved_bytes)}, of which {format_bytes(staying_bytes)} are on "
            f"the GPU at a time; the computation waits {stalled_s * 1e3:.0f} ms for the copies",
        )

    @property
    def _window_bytes(self) -> int:
        if self.window_bytes is not None:
            return self.window_bytes
        return GIB if self.what == "kept" else 0  # one storage is always on its way

    def _moved_bytes(self, block: BlockProfile) -> int:
        if block.name not in self.blocks:
            return 0
        return block.input_bytes + (block.kept_bytes if self.what == "kept" else 0)

    def _stalled_forward_s(self, profile: Profile, window_bytes: int) -> float:
        """A queue of bytes: blocks put theirs in, the link takes out as time passes, and a full window stalls."""
        rate, queued_bytes, stalled_s = profile.link_to_host_bytes_per_s, 0.0, 0.0
        for block in profile.blocks:
            queued_bytes = max(queued_bytes + self._moved_bytes(block) - block.forward_s * rate, 0.0)
            over_bytes = max(queued_bytes - window_bytes, 0.0)
            stalled_s += over_bytes / rate
            queued_bytes -= over_bytes
        return stalled_s

    def _stalled_backward_s(self, profile: Profile, window_bytes: int) -> float:
        """A store of bytes: the link fills it up to the window as time passes, and a block that finds too few stalls."""
        rate, ahead_bytes, stalled_s = profile.link_to_device_bytes_per_s, float(window_bytes), 0.0
        for block in reversed(profile.blocks):
            missing_bytes = max(self._moved_bytes(block) - ahead_bytes, 0.0)
            ahead_bytes = max(ahead_bytes - self._moved_bytes(block), 0.0)
            busy_s = block.backward_s + (block.forward_s if self.what == "inputs" else 0.0)  # it is run again
            block_s = max(busy_s, missing_bytes / rate)
            stalled_s += block_s - busy_s
            ahead_bytes = min(ahead_bytes + block_s * rate - missing_bytes, window_bytes)
        return stalled_s

    def apply(self, training: Training) -> Undo:
        reason = self.why_not(training)
        if reason is not None:
            raise NotApplicable(
                f"Activations cannot be moved to the host: {reason}.",
                hint="Name blocks as `model.named_modules()` does, each once.",
            )
        pool = PinnedPool(training.device, host_limit_bytes(training.device, self.host_bytes))
        return self.apply_with(PinnedKeeper(training.device, pool), training)

    def apply_with(self, keeper: Keeper, training: Training) -> Undo:
        """Let the bytes wait somewhere else than in pinned memory."""
        window = OffloadWindow(training.device, keeper, window_bytes=self._window_bytes)
        with ExitStack() as stack:
            for name in self.blocks:
                block = training.model.get_submodule(name)
                stack.callback(replace_forward(block, self._offloading(block, window)))
            return stack.pop_all().close

    def _offloading(self, block: nn.Module, window: OffloadWindow) -> Callable[..., Any]:
        before = block.forward
        own = [*block.parameters(), *block.buffers()]

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return before(*args, **kwargs)
            inputs = set(_keys((args, kwargs))) if self.what == "inputs" else None
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


def _keys(inputs: Any) -> Iterator[int]:
    return (storage_key(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
