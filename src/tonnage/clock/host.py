"""What the host takes for the calls of a step: Python, the dispatcher, autograd's engine and the driver.

Seconds were measured beside an H200 (`data/host.toml`); hosts differ, and the range of a step's time says by how much.
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tonnage.clock.captured import Moment
from tonnage.clock.launch import Launch

_DATA = Path(__file__).parent / "data" / "host.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """Seconds of the host for one of each."""

    operator: float
    backward_operator: float
    inner_operator: float
    triton_kernel: float
    launch: dict[str, float]

    def call_s(self, moment: Moment) -> float:
        """For a call, without what it launches."""
        if moment.call.kind != "operator":
            return 0.0
        if moment.is_inner:
            return self.inner_operator
        return self.backward_operator if moment.thread else self.operator

    def launch_s(self, launch: Launch) -> Any:
        """For its kernels."""
        return launch.kernels * self.launch.get(launch.kind, self.launch["default"])


@cache
def host_costs() -> HostCosts:
    """The figures that ship with the package."""
    return HostCosts(**tomllib.loads(_DATA.read_text("utf-8")))
