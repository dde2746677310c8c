"""`torch.distributed` on a virtual cluster: every backend becomes a virtual group, and no socket is opened.

PyTorch's own Python (distributed_c10d.py, device_mesh.py, FSDP, DDP) runs unchanged; only the native groups and the
store are replaced.
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
from torch.distributed import device_mesh, rendezvous  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from tonnage.errors import BadLayout
from tonnage.hardware.cluster import Cluster
from tonnage.virtual.cluster.exchange import ProcessGroup, at
from tonnage.virtual.cluster.groups import VirtualGroup
from tonnage.virtual.cluster.member import Member
from tonnage.virtual.cuda.patches import Patches


class HubStore(dist.Store):  # type: ignore[name-defined]
    """The rendezvous store, kept by the hub. Stores of the same name share their keys.

    A key that is never set is reported at once, instead of after a timeout.
    """

    def __init__(self, member: Member, name: str = "") -> None:
        super().__init__()
        self._member, self._name = member, name

    def _ask(self, action: str, key: str, value: Any = None) -> Any:
        return self._member.exchange.ask("keep", action, self._name + key, value)

    def set(self, key: str, value: Any) -> None:
        kept = value.encode() if isinstance(value, str) else bytes(value)
        self._member.exchange.send("keep", "set", self._name + key, kept)

    def get(self, key: str) -> bytes:
        return bytes(self._ask("get", key, self._member.line()))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set the key if its value is `expected` ("" means not set), and return the value afterwards."""
        here = self.get(key) if self.check([key]) else b""
        wanted = expected.encode() if isinstance(expected, str) else bytes(expected)
        if here != wanted:
            return here or wanted
        self.set(key, desired)
        return self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(self._ask("check", key, self._member.line()) for key in keys)

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        for key in keys:
            self.get(key)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", key))

    def num_keys(self) -> int:
        """Return 0: keys are not counted."""
        return 0

    def set_timeout(self, timeout: timedelta) -> None:
        """Ignore the timeout: nothing times out here."""


class GroupOptions:
    """Replaces `ProcessGroupNCCL.Options`; the options have no effect on memory."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = _Config()
        self._timeout: Any = None
        self.split_from: Any = None
        self.split_color = 0
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""


class _Config:
    """Replaces `ncclConfig_t`, with any field."""

    def __getattr__(self, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        return 0


def install(member: Member, patches: Patches) -> None:
    """Replace the groups and stores of `torch.distributed` with those of the virtual cluster."""
    making: list[ProcessGroup] = []

    def backend_class(title: str) -> Any:
        """Make a class for each backend: torch.distributed distinguishes them by `isinstance`."""

        def __init__(self: Any, *_: Any, **__: Any) -> None:
            VirtualGroup.__init__(self, member, making[-1])
            self.options, self.uid = GroupOptions(), 0

        create, policies = (
            classmethod(lambda cls, ranks: cls()),
            {"NCCL_CTA_POLICY_ZERO": 2, "NCCL_CTA_POLICY_DEFAULT": 0},
        )
        return type(
            title, (VirtualGroup,), {"__init__": __init__, "create": create, "Options": GroupOptions, **policies}
        )

    titles = ("ProcessGroupNCCL", "ProcessGroupGloo", "ProcessGroupMPI", "ProcessGroupUCC")
    classes = {title: backend_class(title) for title in titles}
    plain, plain_mesh = c10d._new_process_group_helper, device_mesh.init_device_mesh

    def new_group(size: int, place: int, ranks: list[int], backend: Any, *arguments: Any, **keywords: Any) -> Any:
        group = member.group_made(ranks or range(member.world), str(backend))
        with ExitStack() as stack:
            if group is not None:
                making.append(group)
                stack.callback(making.pop)
            return plain(size, place, ranks, backend, *arguments, **keywords)

    @wraps(plain_mesh)
    def make_mesh(device_type: str, mesh_shape: tuple[int, ...], *arguments: Any, **keywords: Any) -> Any:
        """Notice meshes that leave out ranks, which PyTorch accepts silently."""
        size = prod(mesh_shape)
        if 0 < size < member.world:
            member.exchange.send("part_mesh", f"The mesh {tuple(mesh_shape)}{at(member.line())}", size)
        return plain_mesh(device_type, mesh_shape, *arguments, **keywords)

    for module in (c10d, dist):
        patches.set_all(module, {**classes, "split_group": _split_group})
    patches.set_all(c10d, dict.fromkeys(("_NCCL_AVAILABLE", "_MPI_AVAILABLE", "_UCC_AVAILABLE"), True))
    patches.set(c10d, "default_pg_nccl_timeout", timedelta(minutes=10))
    plugin = c10d.Backend._BackendPlugin(lambda *_: classes["ProcessGroupNCCL"](), True)
    patches.set_item(c10d.Backend._plugins, "FAKE", plugin)
    patches.set(c10d, "_new_process_group_helper", new_group)
    for module in (device_mesh, dist):
        patches.set(module, "init_device_mesh", make_mesh)
    _install_store(member, patches)
    # `join` counts ranks with data left in a float32 tensor on the card, whose value is unknown; a host tensor is
    # exchanged.
    patches.set(DistributedDataParallel, "join_device", property(lambda _: torch.device("cpu")))


def _split_group(parent_pg: Any = None, split_ranks: Any = None, *_: Any, **keywords: Any) -> Any:
    """Replace `dist.split_group`: make the groups one by one and return this rank's."""
    if not split_ranks:
        raise ValueError("split_ranks cannot be None or empty")
    parent = dist.get_process_group_ranks(parent_pg or dist.group.WORLD)
    wanted = {name: keywords[name] for name in ("timeout", "group_desc") if name in keywords}
    made = [dist.new_group([parent[place] for place in sorted(places)], **wanted) for places in split_ranks]
    return next((group for group in made if group is not dist.GroupMember.NON_GROUP_MEMBER), None)


def _install_store(member: Member, patches: Patches) -> None:
    """Use the hub's store for every rendezvous (`env://`, `tcp://`, `file://`)."""
    store = HubStore(member)

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

    def store_class(title: str) -> type[HubStore]:
        """Make a class on the hub's store, with the address as key prefix. Creating one announces a group of all ranks."""

        def __init__(self: Any, *address: Any, **named: Any) -> None:
            member.exchange.send("made", tuple(range(member.world)))
            where = [*address[: 2 if title == "TCPStore" else 1], *named.values()][:2]
            HubStore.__init__(self, member, f"{title} {':'.join(map(str, where))}/")
            self.host, self.port = (str(where[0]), where[-1]) if title == "TCPStore" else ("", 0)

        return type(title, (HubStore,), {"__init__": __init__})

    stores = {title: store_class(title) for title in ("TCPStore", "FileStore")}
    for module in (c10d, dist, rendezvous):
        patches.set_all(module, {"rendezvous": meet, **stores})


def install_spawn(rank: int, cluster: Cluster, patches: Patches) -> None:
    """Replace `torch.multiprocessing.spawn`: every rank already has a process, so each calls the function itself.

    What the script does before it spawns is done by every rank here, but once per host on real ones.
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
        # With join=False the script joins the processes itself: they are done already.
        return None if join else SimpleNamespace(join=lambda *_, **__: True)

    module = sys.modules["torch.multiprocessing.spawn"]  # the function of the same name hides the module
    for owner in (torch.multiprocessing, module):
        patches.set_all(owner, {"spawn": spawn, "start_processes": spawn})
