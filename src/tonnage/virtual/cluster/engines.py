"""Watches sharding engines: tensors that they create, and models that they get unsharded.

FSDP2's unsharded parameters and buffers and DDP's buckets are created during forward and backward, where other new
tensors count as activations. Each gets its category and a name, so that the ledger can show it separately.

An engine (DDP, FSDP 1 and 2, DeepSpeed) keeps its model whole on every rank or shards what it is given, so before that
the ranks of one group hold the same model several times on their host. Ranks that build only their own part (DTensors,
`zero.Init`) are not counted.
"""

from collections.abc import Callable, Iterable
from typing import Any

from tonnage.ledger import Category
from tonnage.recording import Allocation
from tonnage.recording.cluster import WholeModel
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

        def watched(plain: Callable[..., Any], category: Category, title: str) -> Callable[..., Any]:
            def watch(*arguments: Any, **keywords: Any) -> Any:
                who, start = self._device.attribution, len(self._device.allocations)
                before, who.category = who.category, category
                try:
                    return plain(*arguments, **keywords)
                finally:
                    who.category = before
                    self._names |= dict.fromkeys(range(start, len(self._device.allocations)), title)

            return watch

        parameter = _fsdp_param.FSDPParam
        for owner, name, category, title in (
            (parameter, "init_all_gather_outputs", Category.PARAMETERS, UNSHARDED),
            (parameter, "alloc_all_gather_outputs", Category.PARAMETERS, UNSHARDED),
            (parameter, "init_unsharded_param", Category.PARAMETERS, UNSHARDED),
            (_fsdp_param_group, "foreach_all_gather", Category.WORKSPACE, GATHERED),
            (_fsdp_param_group, "foreach_reduce", Category.WORKSPACE, REDUCED),
            (DistributedDataParallel, "_ddp_init_helper", Category.GRADIENTS, BUCKETS),
            (dist.Reducer, "_rebuild_buckets", Category.GRADIENTS, BUCKETS),  # type: ignore[attr-defined]
        ):
            plain = getattr(owner, name, None)
            if plain is not None:  # a private function, which other versions of torch may lack
                patches.set(owner, name, watched(plain, category, title))
        reduce = _fsdp_param_group.foreach_reduce  # type: ignore[attr-defined]

        def see_gradients(parameters: Any, gradients: Any, *arguments: Any, **keywords: Any) -> Any:
            self._device.attribution.mark(Category.GRADIENTS, gradients)
            return reduce(parameters, gradients, *arguments, **keywords)

        patches.set(_fsdp_param_group, "foreach_reduce", see_gradients)

    def bytes_by_name(self, blocks: Iterable[Allocation]) -> dict[str, int]:
        """Return the bytes of an engine's blocks among these; a buffer that became a gradient counts as a gradient."""
        found: dict[str, int] = {}
        for block in blocks:
            name = self._names.get(block.index)
            if name and not (name == REDUCED and block.category is Category.GRADIENTS):
                found[name] = found.get(name, 0) + block.block_bytes
        return found


class WholeModels:
    """The largest model that an engine got on this rank."""

    def __init__(self, rank: int, gpus_per_host: int) -> None:
        self._rank, self._gpus_per_host = rank, gpus_per_host
        self._sharded_bytes = 0  # fully_shard gets a model module by module
        self.largest = WholeModel()

    def watch(self, patches: Patches) -> None:
        """Patch each engine to note its model when it is created."""
        import torch.distributed as dist
        from torch import nn
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp._fully_shard import _fsdp_param
        from torch.nn.parallel import DistributedDataParallel

        def watch_wrapper(kind: type[Any], engine: str) -> None:
            plain = kind.__init__

            def init(this: Any, module: Any, *arguments: Any, **keywords: Any) -> None:
                size = _plain_bytes(module.parameters())
                plain(this, module, *arguments, **keywords)
                self._see(engine, size, dist.get_process_group_ranks(this.process_group))

            patches.set(kind, "__init__", init)

        watch_wrapper(DistributedDataParallel, "DDP")
        watch_wrapper(FullyShardedDataParallel, "FSDP")
        plain_shard = _fsdp_param.FSDPParam.__init__

        def shard(
            this: Any, parameter: Any, module_info: Any, mesh_info: Any, *arguments: Any, **keywords: Any
        ) -> None:
            self._sharded_bytes += _plain_bytes([parameter])
            self._see("fully_shard", self._sharded_bytes, mesh_info.mesh.mesh.flatten().tolist())
            plain_shard(this, parameter, module_info, mesh_info, *arguments, **keywords)

        patches.set(_fsdp_param.FSDPParam, "__init__", shard)

        def registered(owner: Any, name: str, module: Any) -> None:
            if name == "module" and type(owner).__name__ == "DeepSpeedEngine" and module is not None:
                self._see("DeepSpeed", _plain_bytes(module.parameters()), range(dist.get_world_size()))

        patches.on_undo(nn.modules.module.register_module_module_registration_hook(registered).remove)

    def _see(self, engine: str, size_bytes: int, ranks: Any) -> None:
        if size_bytes >= self.largest.size_bytes:
            host = self._rank // self._gpus_per_host
            copies = sum(rank // self._gpus_per_host == host for rank in ranks)
            self.largest = WholeModel(engine, size_bytes, copies)


def _plain_bytes(parameters: Any) -> int:
    """Return the bytes of parameters that are neither DTensors nor partitioned by DeepSpeed."""
    whole = {id(p): p for p in parameters if not (hasattr(p, "_local_tensor") or hasattr(p, "ds_id"))}
    return sum(p.numel() * p.element_size() for p in whole.values())
