"""What leaves the GPU for the host or a disk, and the memory that the host needs for it. For one GPU's share."""

from dataclasses import dataclass

import numpy as np

from tonnage.budget.configuration import Configuration, Place, Quantity
from tonnage.budget.frameworks import master_bytes
from tonnage.budget.states import States
from tonnage.budget.terms import Term, total
from tonnage.ledger import Category

# DeepSpeed's defaults for swapping to NVMe: buffers of so many FP32 numbers stay in pinned host memory.
NVME_BUFFERS = 5
NVME_BUFFER_BYTES = 4 * 100_000_000


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of the host, and how many of them must be pinned for transfers to overlap."""

    host_bytes: Quantity
    pinned_bytes: Quantity

    def __add__(self, other: "HostMemory") -> "HostMemory":
        return HostMemory(self.host_bytes + other.host_bytes, self.pinned_bytes + other.pinned_bytes)


def offloads(configuration: Configuration) -> bool:
    """Anything leaves the GPU at all."""
    places = (configuration.optimizer_place, configuration.parameter_place, configuration.activation_place)
    return configuration.paged or any(place != "gpu" for place in places)


def stays(term: Term, configuration: Configuration) -> bool:
    """The term is on the GPU."""
    return _place(term, configuration) == "gpu"


def _place(term: Term, configuration: Configuration) -> Place:
    if term.category is Category.OPTIMIZER_STATES:
        # Paged states need room for those of one tensor at a time, which is nothing.
        return "host" if configuration.paged else configuration.optimizer_place
    if term.category is Category.PARAMETERS and not term.name.startswith("gathered parameters"):
        return configuration.parameter_place
    if term.category is Category.ACTIVATIONS and term.name.startswith("kept by"):
        return configuration.activation_place
    if term.name == "gradients" and configuration.framework in ("deepspeed", "fsdp2"):
        # Handed over as soon as they are reduced; the host's copy is counted in `host_memory`.
        return "gpu" if configuration.optimizer_place == "gpu" else "host"
    return "gpu"


def host_memory(terms: tuple[Term, ...], states: States, configuration: Configuration) -> HostMemory:
    """What left the GPU; for an optimizer on the host also gradients to read and parameters to write, pinned.

    Parameters that are on the host themselves are written in place, and those that are frozen are not written.
    """
    memory = HostMemory(0.0, 0.0)
    for term in terms:
        place = _place(term, configuration)
        if place != "gpu" and term.name != "gradients":
            memory += _held(term, place)
    if configuration.optimizer_place == "gpu":
        return memory
    exchanged = states.gradients.size_bytes
    if not master_bytes(configuration) and configuration.parameter_place != "host":
        exchanged = exchanged + total(term for term in states.parameters if not term.name.startswith("frozen"))
    return memory + HostMemory(exchanged, exchanged)


def _held(term: Term, place: Place) -> HostMemory:
    """Parameters and activations cross the link in every pass, so they are pinned."""
    if place == "nvme":
        staged = np.minimum(term.size_bytes, float(NVME_BUFFERS * NVME_BUFFER_BYTES))
        return HostMemory(staged, staged)
    pinned = 0.0 if term.category is Category.OPTIMIZER_STATES else term.size_bytes
    return HostMemory(term.size_bytes, pinned)
