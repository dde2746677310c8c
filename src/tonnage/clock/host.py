"""Host time for the calls of a step: Python, the dispatcher, autograd's engine and the driver.

Seconds were measured beside an H200, on an otherwise idle core (`data/host.toml`). Hosts differ, and most share cores:
the range of a step's time reflects this.
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tonnage.clock import facts
from tonnage.clock.captured import CallInStep
from tonnage.clock.launch import Launch

OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCosts:
    """Host seconds per operator and launch within one phase of a step.

    `launching` is the extra time of an operator that launches certain kinds of kernels: cuBLAS, cuDNN and attention
    first select theirs.
    """

    operator: float
    inner_operator: float
    launch: float  # an operator's first kernel
    further_kernel: float
    recurrent_kernel: float = 0.0  # cuDNN launches many from one operator
    launching: dict[str, float] = field(default_factory=dict)

    def launch_s(self, launch: Launch) -> Any:
        """Return the seconds for a launch by an operator; its kernels may be an array."""
        if launch.kind == "recurrent":
            return launch.kernels * self.recurrent_kernel
        if launch.kind == "matmul":  # several are separate products
            return launch.kernels * (self.launch + self.launching.get("matmul", 0.0))
        return self.launch + (launch.kernels - 1) * self.further_kernel + self.launching.get(launch.kind, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """Host seconds by phase; a recomputed forward in the backward pass costs what a forward does."""

    forward: PhaseCosts
    backward: PhaseCosts
    optimizer: PhaseCosts
    compiled: PhaseCosts  # what compiled code calls beside its own kernels
    optimizer_step: float
    optimizer_parameter: float
    triton_kernel: float  # everything compiled code needs per kernel
    compiled_region: float
    compiled_parameter: float  # guards and argument passing
    recomputed_tensor: float

    def phase(self, moment: CallInStep) -> PhaseCosts:
        """Return the costs that apply where a call is."""
        if moment.is_compiled:
            return self.compiled
        if moment.phase == OPTIMIZER:
            return self.optimizer
        return self.backward if moment.thread and moment.phase != "recompute" else self.forward

    def call_s(self, moment: CallInStep) -> float:
        """Return the seconds for a call, without its launches."""
        call = moment.call
        if call.kind != "operator":
            if call.name == "detach" and moment.phase == "recompute":
                return self.recomputed_tensor
            return self.compiled_region if call.is_compiled else 0.0
        costs = self.phase(moment)
        return costs.inner_operator if moment.is_inner else costs.operator

    def launch_s(self, moment: CallInStep, launch: Launch) -> float:
        """Return the seconds for its kernels."""
        if moment.call.kind == "kernel":
            return self.triton_kernel
        return float(self.phase(moment).launch_s(launch))

    def optimizer_s(self, parameters: Any) -> Any:
        """Return what an optimizer does per parameter before it launches anything."""
        return self.optimizer_step + parameters * self.optimizer_parameter


@cache
def host_costs() -> HostCosts:
    """Return the packaged costs, for a host with shared cores."""
    figures = dict(facts("host"))
    factor = figures.pop("shared")

    def scaled(value: Any) -> Any:
        return {name: scaled(each) for name, each in value.items()} if isinstance(value, dict) else factor * value

    costs: dict[str, Any] = scaled(figures)
    phases = {name: PhaseCosts(**cost) for name, cost in costs.items() if isinstance(cost, dict)}
    return HostCosts(**costs | phases)


@cache
def kernel_floor_s() -> float:
    """Return the seconds of an empty kernel, including the gap to the next one; this module does not import NumPy."""
    common = facts("memory")["common"]
    return float(common["kernel_s"] + common["gap_s"])
