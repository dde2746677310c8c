"""Detects which engine (DDP, FSDP 1 and 2, DeepSpeed) got an unsharded model, and on how many ranks of a host.

An engine keeps its model whole on every rank or shards what it is given, so before that the ranks of one group hold
the same model several times on their host. Ranks that build only their own part (DTensors, `zero.Init`) are not
counted.
"""

from typing import Any

from tonnage.recording.cluster import WholeModel
from tonnage.virtual.cuda.patches import Patches


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
