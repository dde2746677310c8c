"""Detect the virtual GPU, where tensors have no values and kernels do not run."""

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from tonnage.hardware.cluster import Cluster


def on_virtual_gpu(device: torch.device) -> bool:
    """Return whether this device is a Tonnage virtual GPU. Imports nothing."""
    sessions = sys.modules.get("tonnage.virtual.session")
    return device.type == "cuda" and sessions is not None and sessions._current is not None


def virtual_cluster() -> Cluster | None:
    """Return the virtual cluster that this process is a rank of, or None."""
    sessions = sys.modules.get("tonnage.virtual.session")
    session = sessions and sessions._current
    return session.cluster if session else None


def uncaptured() -> AbstractContextManager[Any]:
    """Exclude what runs inside from the steps of a script on a virtual GPU."""
    sessions = sys.modules.get("tonnage.virtual.session")
    session = sessions and sessions._current
    return session.uncaptured() if session else nullcontext()
