"""Detect the virtual GPU, where tensors have no values and kernels do not run."""

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from tonnage.hardware.cluster import Cluster


def _session() -> Any:
    """Return the session of the virtual GPU, or None. Imports nothing."""
    sessions = sys.modules.get("tonnage.virtual.session")
    return sessions and sessions._current


def on_virtual_gpu(device: torch.device) -> bool:
    return device.type == "cuda" and _session() is not None


def virtual_cluster() -> Cluster | None:
    """Return the virtual cluster that this process is a rank of, or None."""
    return getattr(_session(), "cluster", None)


def uncaptured() -> AbstractContextManager[Any]:
    """Exclude what runs inside from the steps of a script on a virtual GPU."""
    session = _session()
    return session.uncaptured() if session else nullcontext()
