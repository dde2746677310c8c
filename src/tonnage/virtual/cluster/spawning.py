"""Scripts that start their own processes with `torch.multiprocessing.spawn`, one for each GPU of a host.

Every rank has its process already, so each one runs the function as the process that it is, and nothing is spawned.
What the script does before it spawns is done by every rank here, and once a host on real ones.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch.multiprocessing

from tonnage.errors import BadLayout
from tonnage.hardware.cluster import Cluster
from tonnage.virtual.cuda.patches import Patches


def install(rank: int, cluster: Cluster, patches: Patches) -> None:
    """From now on, to spawn is to call."""
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
        return None if join else _Joined()

    module = sys.modules["torch.multiprocessing.spawn"]  # the function of that name hides it
    for owner in (torch.multiprocessing, module):
        patches.set_all(owner, {"spawn": spawn, "start_processes": spawn})


class _Joined:
    """What `spawn` returns where the script joins the processes itself."""

    def join(self, *_: Any, **__: Any) -> bool:
        """They are done."""
        return True
