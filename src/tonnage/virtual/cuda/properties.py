"""What `torch.cuda.get_device_properties` returns: a GPU of the catalogue, under CUDA's names."""

import uuid
from dataclasses import dataclass, fields

from tonnage.hardware import Gpu
from tonnage.units import MIB

_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "tonnage")


class _CUuuid:
    """A card's UUID, the same for the same GPU and index."""

    def __init__(self, value: uuid.UUID) -> None:
        self.bytes = list(value.bytes)
        self._text = str(value)

    def __str__(self) -> str:
        return self._text


@dataclass(frozen=True, repr=False)
class _CudaDeviceProperties:
    """The fields of PyTorch's class of this name; clock rates are in kHz, sizes in bytes."""

    name: str
    major: int
    minor: int
    is_multi_gpu_board: int
    is_integrated: int
    multi_processor_count: int
    total_memory: int
    max_threads_per_multi_processor: int
    max_threads_per_block: int
    warp_size: int
    clock_rate: int
    memory_clock_rate: int
    memory_bus_width: int
    shared_memory_per_block: int
    shared_memory_per_block_optin: int
    shared_memory_per_multiprocessor: int
    regs_per_multiprocessor: int
    L2_cache_size: int
    gcnArchName: str
    uuid: _CUuuid
    pci_bus_id: int
    pci_device_id: int
    pci_domain_id: int

    def __repr__(self) -> str:
        shown = {field.name: getattr(self, field.name) for field in fields(self)}
        return (
            "_CudaDeviceProperties(name='{name}', major={major}, minor={minor}, total_memory={total}MB, "
            "multi_processor_count={multi_processor_count}, uuid={uuid}, pci_bus_id={pci_bus_id}, "
            "pci_device_id={pci_device_id}, pci_domain_id={pci_domain_id}, L2_cache_size={cache}MB)"
        ).format(**shown, total=self.total_memory // MIB, cache=self.L2_cache_size // MIB)


def properties_of(gpu: Gpu, index: int) -> _CudaDeviceProperties:
    """Return the properties of the card at an index."""
    major, minor = gpu.compute_capability
    return _CudaDeviceProperties(
        name=gpu.name,
        major=major,
        minor=minor,
        is_multi_gpu_board=0,
        is_integrated=0,
        multi_processor_count=gpu.sm_count,
        total_memory=gpu.memory_bytes,
        max_threads_per_multi_processor=gpu.max_threads_per_sm,
        max_threads_per_block=gpu.max_threads_per_block,
        warp_size=gpu.warp_size,
        clock_rate=gpu.clock_mhz * 1000,
        memory_clock_rate=gpu.memory_clock_mhz * 1000,
        memory_bus_width=gpu.memory_bus_bits,
        shared_memory_per_block=gpu.shared_memory_per_block_bytes,
        shared_memory_per_block_optin=gpu.shared_memory_per_block_optin_bytes,
        shared_memory_per_multiprocessor=gpu.shared_memory_per_sm_bytes,
        regs_per_multiprocessor=gpu.registers_per_sm,
        L2_cache_size=gpu.l2_bytes,
        gcnArchName=gpu.name,
        uuid=_CUuuid(uuid.uuid5(_NAMESPACE, f"{gpu.key}/{index}")),
        pci_bus_id=0,
        pci_device_id=index + 1,
        pci_domain_id=0,
    )
