"""What is offloaded to the host or a drive, and the host memory it needs, per GPU."""

from dataclasses import dataclass

import numpy as np

from tonnage.budget.configuration import Configuration, Place, Quantity
from tonnage.budget.frameworks import master_bytes
from tonnage.budget.states import States
from tonnage.budget.terms import Term, total
from tonnage.ledger import Category

# DeepSpeed's defaults for NVMe offload: this many buffers of this many FP32 elements stay in pinned host memory.
NVME_BUFFERS = 5
NVME_BUFFER_BYTES = 4 * 100_000_000


@dataclass(frozen=True, slots=True)
class HostBytes:
    """Bytes on the host, and how many of them must be pinned for transfers to overlap."""

    host_bytes: Quantity
    pinned_bytes: Quantity

    def __add__(self, other: "HostBytes") -> "HostBytes":
        return HostBytes(self.host_bytes + other.host_bytes, self.pinned_bytes + other.pinned_bytes)


def offloads(configuration: Configuration) -> bool:
    """Say whether anything is offloaded."""
    places = (configuration.optimizer_place, configuration.parameter_place, configuration.activation_place)
    return configuration.paged or any(place != "gpu" for place in places)


def stays(term: Term, configuration: Configuration) -> bool:
    """Say whether the term stays on the GPU."""
    return _place(term, configuration) == "gpu"


def _place(term: Term, configuration: Configuration) -> Place:
    if term.category is Category.OPTIMIZER_STATES:
        # Paged states need room for one tensor's states at a time, which is negligible.
        return "host" if configuration.paged else configuration.optimizer_place
    if term.category is Category.PARAMETERS and not term.name.startswith("gathered parameters"):
        return configuration.parameter_place
    if term.category is Category.ACTIVATIONS and term.name.startswith("kept by"):
        return configuration.activation_place
    if term.name == "gradients" and configuration.framework in ("deepspeed", "fsdp2"):
        # Copied as soon as they are reduced; the host's copy is counted in `host_memory`.
        return "gpu" if configuration.optimizer_place == "gpu" else "host"
    return "gpu"


def host_memory(terms: tuple[Term, ...], states: States, configuration: Configuration) -> HostBytes:
    """Return the offloaded memory; with the optimizer on the host also pinned gradients to read and parameters to
    write.

    Parameters on the host are written in place, and frozen ones are not written.
    """
    memory = HostBytes(0.0, 0.0)
    for term in terms:
        place = _place(term, configuration)
        if place != "gpu" and term.name != "gradients":
            memory += _held(term, place)
    if configuration.optimizer_place == "gpu":
        return memory
    exchanged = states.gradients.size_bytes
    if not master_bytes(configuration) and configuration.parameter_place != "host":
        exchanged = exchanged + total(term for term in states.parameters if not term.name.startswith("frozen"))
    return memory + HostBytes(exchanged, exchanged)


def _held(term: Term, place: Place) -> HostBytes:
    """Return one term's host memory. Parameters and activations are transferred in every pass, so they are pinned."""
    if place == "nvme":
        staged = np.minimum(term.size_bytes, float(NVME_BUFFERS * NVME_BUFFER_BYTES))
        return HostBytes(staged, staged)
    pinned = 0.0 if term.category is Category.OPTIMIZER_STATES else term.size_bytes
    return HostBytes(term.size_bytes, pinned)
