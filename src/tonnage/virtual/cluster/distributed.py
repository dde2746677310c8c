"""`torch.distributed` on a virtual cluster: every backend that a script may name is a virtual group, and nothing listens.

PyTorch's own Python (distributed_c10d.py, device_mesh.py, FSDP, DDP) runs as it is; what it would build natively are the
groups and the store, and these are given to it.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import wraps
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed import device_mesh, rendezvous
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from tonnage.errors import BadLayout
from tonnage.hardware.cluster import Cluster
from tonnage.virtual.cluster.calls import Group, at
from tonnage.virtual.cluster.groups import VirtualGroup
from tonnage.virtual.cluster.member import Member
from tonnage.virtual.cluster.store import HubStore
from tonnage.virtual.cuda.patches import Patches


class Options:
    """What a script may set on `ProcessGroupNCCL.Options`; kept, without an effect on memory."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = _Config()
        self._timeout: Any = None
        self.split_from: Any = None
        self.split_color = 0
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""


class _Config:
    """`ncclConfig_t`: any field."""

    def __getattr__(self, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        return 0


def _backend_class(title: str, current: Callable[[], tuple[Member, Group]]) -> type[VirtualGroup]:
    """A class of its own for each backend: torch.distributed tells them apart by `isinstance`."""

    def __init__(self: Any, *_: Any, **__: Any) -> None:
        VirtualGroup.__init__(self, *current())
        self.options = Options()
        self.uid = 0

    contents = {"__init__": __init__, "Options": Options, "NCCL_CTA_POLICY_ZERO": 2, "NCCL_CTA_POLICY_DEFAULT": 0}
    contents["create"] = classmethod(lambda cls, ranks: cls())
    return type(title, (VirtualGroup,), contents)


def install(member: Member, store: HubStore, patches: Patches) -> None:
    """From now on `torch.distributed` is the virtual cluster."""
    making: list[Group] = []
    classes: dict[str, Any] = {name: _backend_class(name, lambda: (member, making[-1])) for name in _CLASSES}
    for name, made in classes.items():
        patches.set(c10d, name, made)
        patches.set(dist, name, made)
    patches.set(c10d, "default_pg_nccl_timeout", timedelta(minutes=10))
    for name in ("_NCCL_AVAILABLE", "_MPI_AVAILABLE", "_UCC_AVAILABLE"):
        patches.set(c10d, name, True)
    plugin = c10d.Backend._BackendPlugin(lambda *_: classes["ProcessGroupNCCL"](), True)
    patches.set_item(c10d.Backend._plugins, "FAKE", plugin)
    patches.set(c10d, "_new_process_group_helper", _helper(member, making))
    for module in (c10d, dist):
        patches.set(module, "split_group", _split_group)
    _install_store(member, store, patches)
    patches.set(device_mesh, "init_device_mesh", _mesh_maker(member))
    patches.set(dist, "init_device_mesh", device_mesh.init_device_mesh)
    # `join` counts who has data left with a float32 of the card, whose value nobody knows; a host tensor is exchanged.
    patches.set(DistributedDataParallel, "join_device", property(lambda _: torch.device("cpu")))


_CLASSES = ("ProcessGroupNCCL", "ProcessGroupGloo", "ProcessGroupMPI", "ProcessGroupUCC")


def _helper(member: Member, making: list[Group]) -> Callable[..., Any]:
    plain = c10d._new_process_group_helper

    def new_group(size: int, place: int, ranks: list[int], backend: Any, *arguments: Any, **keywords: Any) -> Any:
        group = member.group_made(ranks or range(member.world), str(backend))
        with ExitStack() as stack:
            if group is not None:
                making.append(group)
                stack.callback(making.pop)
            return plain(size, place, ranks, backend, *arguments, **keywords)

    return new_group


def _split_group(parent_pg: Any = None, split_ranks: Any = None, *_: Any, **keywords: Any) -> Any:
    """`dist.split_group` without a communicator to split: one group after another, and this rank's own comes back."""
    if not split_ranks:
        raise ValueError("split_ranks cannot be None or empty")
    parent = dist.get_process_group_ranks(parent_pg or dist.group.WORLD)
    wanted = {name: keywords[name] for name in ("timeout", "group_desc") if name in keywords}
    made = [dist.new_group([parent[place] for place in sorted(places)], **wanted) for places in split_ranks]
    return next((group for group in made if group is not dist.GroupMember.NON_GROUP_MEMBER), None)


def _install_store(member: Member, store: HubStore, patches: Patches) -> None:
    """Whatever a script meets at (`env://`, `tcp://`, `file://`), it meets in this store."""

    def meet(url: str, rank: int = -1, world_size: int = -1, **_: Any) -> Iterator[Any]:
        if world_size not in (-1, member.world):
            raise BadLayout(
                f"The script asks for a world of {world_size} ranks, and the cluster has {member.world}.",
                hint="Let it read WORLD_SIZE, or name a cluster of that size with --gpus.",
            )
        if rank not in (-1, member.rank):
            raise BadLayout(
                f"The script calls itself rank {rank}, in the process of rank {member.rank}.",
                hint="Let it read RANK from the environment, as torchrun sets it.",
            )
        yield store, member.rank, member.world

    patches.set(rendezvous, "rendezvous", meet)
    patches.set(c10d, "rendezvous", meet)
    patches.set(dist, "rendezvous", meet)
    for module in (c10d, dist, rendezvous):
        patches.set(module, "TCPStore", _store_class("TCPStore", store, member))
        patches.set(module, "FileStore", _store_class("FileStore", store, member))


def _store_class(title: str, store: HubStore, member: Member) -> type[HubStore]:
    """A store that ranks meet in at an address or a file: one of the hub's, with the address for its name.

    Whoever makes one means to meet the others there, as in a group.
    """

    def __init__(self: Any, *address: Any, **named: Any) -> None:
        member.exchange.made(tuple(range(member.world)))
        where = [*address[: 2 if title == "TCPStore" else 1], *named.values()][:2]
        HubStore.__init__(self, store.exchange, store.line, f"{title} {':'.join(map(str, where))}/")
        self.host, self.port = (str(where[0]), where[-1]) if title == "TCPStore" else ("", 0)

    return type(title, (HubStore,), {"__init__": __init__})


def install_spawn(rank: int, cluster: Cluster, patches: Patches) -> None:
    """From now on, to spawn is to call: `torch.multiprocessing.spawn` starts a process for each GPU of a host.

    Every rank has its process already, so each one runs the function as the process that it is. What the script does
    before it spawns is done by every rank here, and once a host on real ones.
    """
    local, count = rank % cluster.gpus_per_host, cluster.gpus_per_host

    def spawn(
        fn: Callable[..., Any], args: Sequence[Any] = (), nprocs: int = 1, join: bool = True, *_: Any, **__: Any
    ) -> Any:
        if nprocs != count:
            raise BadLayout(
                f"The script spawns {nprocs} processes on a host, and the cluster has {count} GPUs a host.",
                hint=f"Let it spawn torch.cuda.device_count() processes, or run it with --gpus {nprocs}x{cluster.gpu.key}.",
            )
        fn(local, *args)
        # What `spawn` returns where the script joins the processes itself: they are done.
        return None if join else SimpleNamespace(join=lambda *_, **__: True)

    module = sys.modules["torch.multiprocessing.spawn"]  # the function of that name hides it
    for owner in (torch.multiprocessing, module):
        patches.set_all(owner, {"spawn": spawn, "start_processes": spawn})


def _mesh_maker(member: Member) -> Callable[..., Any]:
    """`init_device_mesh`, which PyTorch lets leave out ranks without a word."""
    plain = device_mesh.init_device_mesh

    @wraps(plain)
    def make(device_type: str, mesh_shape: tuple[int, ...], *arguments: Any, **keywords: Any) -> Any:
        size = prod(mesh_shape)
        if 0 < size < member.world:
            member.exchange.part_mesh(f"The mesh {tuple(mesh_shape)}{at(member.line())}", size)
        return plain(device_type, mesh_shape, *arguments, **keywords)

    return make
