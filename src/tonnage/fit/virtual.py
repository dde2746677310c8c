"""Whether tensors have values: on the virtual GPU they have none, and kernels do not run."""

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from tonnage.hardware.cluster import Cluster


def on_virtual_gpu(device: torch.device) -> bool:
    """Whether this device is a virtual GPU of ours. Loads nothing to find out."""
    sessions = sys.modules.get("tonnage.virtual.session")
    return device.type == "cuda" and sessions is not None and sessions._current is not None


def virtual_cluster() -> Cluster | None:
    """The cluster that this process is a rank of, where it is a virtual one."""
    sessions = sys.modules.get("tonnage.virtual.session")
    session = sessions and sessions._current
    return session.cluster if session else None


def uncaptured() -> AbstractContextManager[Any]:
    """Inside, nothing counts as a step of the script that runs on a virtual GPU."""
    sessions = sys.modules.get("tonnage.virtual.session")
    session = sessions and sessions._current
    return session.uncaptured() if session else nullcontext()
