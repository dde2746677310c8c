"""Categorizes tensors that sharding engines create: FSDP2's unsharded parameters and buffers, and DDP's buckets.

They are created during forward and backward, where other new tensors count as activations. Each gets its category and
a name, so that the ledger can show it separately.
"""

from collections.abc import Callable, Iterable
from typing import Any

from tonnage.ledger import Category
from tonnage.recording import Allocation
from tonnage.virtual.cuda.patches import Patches
from tonnage.virtual.recorded import RecordedDevice

UNSHARDED, GATHERED, REDUCED = "unsharded parameters", "all-gather buffers", "reduce-scatter buffers"
BUCKETS = "gradient buckets"


class Engines:
    """The names of blocks that an engine created, by allocation index."""

    def __init__(self, device: RecordedDevice) -> None:
        self._device = device
        self._names: dict[int, str] = {}

    def watch(self, patches: Patches) -> None:
        """Patch the functions of FSDP2 and DDP that create such tensors."""
        import torch.distributed as dist
        from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
        from torch.nn.parallel import DistributedDataParallel

        parameter = _fsdp_param.FSDPParam
        for name in ("init_all_gather_outputs", "alloc_all_gather_outputs", "init_unsharded_param"):
            self._watch(patches, parameter, name, Category.PARAMETERS, UNSHARDED)
        self._watch(patches, _fsdp_param_group, "foreach_all_gather", Category.WORKSPACE, GATHERED)
        self._watch(patches, _fsdp_param_group, "foreach_reduce", Category.WORKSPACE, REDUCED)
        self._see_gradients(patches, _fsdp_param_group)
        self._watch(patches, DistributedDataParallel, "_ddp_init_helper", Category.GRADIENTS, BUCKETS)
        self._watch(patches, dist.Reducer, "_rebuild_buckets", Category.GRADIENTS, BUCKETS)

    def bytes_by_name(self, blocks: Iterable[Allocation]) -> dict[str, int]:
        """Return the bytes of an engine's blocks among these; a buffer that became a gradient counts as a gradient."""
        found: dict[str, int] = {}
        for block in blocks:
            name = self._names.get(block.index)
            if name and not (name == REDUCED and block.category is Category.GRADIENTS):
                found[name] = found.get(name, 0) + block.block_bytes
        return found

    def _watch(self, patches: Patches, owner: Any, name: str, category: Category, title: str) -> None:
        plain = getattr(owner, name, None)
        if plain is not None:  # a private function, which other versions of torch may lack
            patches.set(owner, name, self._watched(plain, category, title))

    def _see_gradients(self, patches: Patches, owner: Any) -> None:
        plain = owner.foreach_reduce

        def see(parameters: Any, gradients: Any, *arguments: Any, **keywords: Any) -> Any:
            self._device.attribution.mark(Category.GRADIENTS, gradients)
            return plain(parameters, gradients, *arguments, **keywords)

        patches.set(owner, "foreach_reduce", see)

    def _watched(self, plain: Callable[..., Any], category: Category, title: str) -> Callable[..., Any]:
        def watched(*arguments: Any, **keywords: Any) -> Any:
            who, start = self._device.attribution, len(self._device.allocations)
            before, who.category = who.category, category
            try:
                return plain(*arguments, **keywords)
            finally:
                who.category = before
                self._names |= dict.fromkeys(range(start, len(self._device.allocations)), title)

        return watched
