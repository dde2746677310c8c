"""NVML's view of the memory of this machine's GPUs and of the processes on them, at one moment.

Memory is queried in its second version, which separates the driver's own (`reserved`) from used memory. A container
hides other processes, so the sum of processes may be less than the GPU's used memory: the difference is kept, not
distributed. A library may be given that has the functions of `pynvml` used here, and its `NVMLError`.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path, PurePath
from typing import Any

from tonnage.errors import MissingPart, TonnageError


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """One process on one GPU. `used_bytes` is None if the driver does not report it."""

    pid: int
    name: str
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """One GPU at one moment. `busy_percent` is None if the driver does not report it."""

    index: int
    name: str
    uuid: str
    total_bytes: int
    used_bytes: int
    reserved_bytes: int
    busy_percent: int | None = None
    processes: tuple[ProcessMemory, ...] = field(default=())

    @property
    def free_bytes(self) -> int:
        """Memory that a process could still allocate."""
        return max(0, self.total_bytes - self.used_bytes - self.reserved_bytes)

    @property
    def unseen_bytes(self) -> int:
        """Memory used by no visible process: other containers, the driver's own."""
        return max(0, self.used_bytes - sum(process.used_bytes or 0 for process in self.processes))


@contextmanager
def open_nvml(library: Any = None) -> Iterator["NvmlReader"]:
    """Open NVML; raises a readable error if there is none."""
    try:
        nvml = library or import_module("pynvml")
    except ImportError:
        hint = "Install it: pip install 'tonnage[nvml]'"
        raise MissingPart("Reading a GPU's memory needs nvidia-ml-py.", hint=hint) from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        hint = "Run it on a machine with an NVIDIA GPU; in a container, pass the GPU in (docker run --gpus all)."
        raise MissingPart(f"There is no NVIDIA driver to ask here (NVML: {error}).", hint=hint) from None
    try:
        reader = NvmlReader(nvml)
        if not reader.count:
            raise MissingPart("NVML finds no GPU on this machine.", hint="Check it with nvidia-smi.")
        yield reader
    finally:
        nvml.nvmlShutdown()


class NvmlReader:
    """Samples every GPU; constant properties are queried once."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        with self._words():
            self._handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            self._names = [(nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle)) for handle in self._handles]
        self._process_names: dict[int, str] = {}

    @property
    def count(self) -> int:
        """Number of GPUs."""
        return len(self._handles)

    def sample(self) -> tuple[GpuMemory, ...]:
        """Return the current state of every GPU."""
        with self._words():
            return tuple(self._gpu(index) for index in range(self.count))

    @contextmanager
    def _words(self) -> Iterator[None]:
        try:
            yield
        except self._nvml.NVMLError as error:
            raise TonnageError(f"NVML does not answer: {error}.", hint="Check the driver with nvidia-smi.") from None

    def _gpu(self, index: int) -> GpuMemory:
        handle, (name, uuid) = self._handles[index], self._names[index]
        nvml, busy = self._nvml, None
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
            reserved = memory.reserved
        except nvml.NVMLError:
            # Drivers before 510 have only the first version, whose used bytes include the reserved ones.
            memory, reserved = nvml.nvmlDeviceGetMemoryInfo(handle), 0
        with suppress(nvml.NVMLError):  # a slice of a GPU (MIG) has no rate
            busy = int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        return GpuMemory(index, name, uuid, memory.total, memory.used, reserved, busy, self._processes(handle))

    def _processes(self, handle: Any) -> tuple[ProcessMemory, ...]:
        """Return processes, largest first; NVML lists those with both compute and graphics twice."""
        nvml, used_by_pid = self._nvml, dict[int, int | None]()
        for listing in (nvml.nvmlDeviceGetGraphicsRunningProcesses, nvml.nvmlDeviceGetComputeRunningProcesses):
            try:
                used_by_pid |= {process.pid: process.usedGpuMemory for process in listing(handle)}
            except nvml.NVMLError:
                continue  # not supported on this GPU, or not allowed
        found = [ProcessMemory(pid, self._process_name(pid), used) for pid, used in used_by_pid.items()]
        return tuple(sorted(found, key=lambda process: (-(process.used_bytes or 0), process.pid)))

    def _process_name(self, pid: int) -> str:
        """Return "python train.py" if the process is readable: the interpreter alone says nothing."""
        if pid not in self._process_names:
            words = [""]
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            script = next((PurePath(word).name for word in words[1:3] if word.endswith(".py")), "")
            name = f"{PurePath(words[0]).name} {script}".strip()
            try:
                self._process_names[pid] = name or PurePath(self._nvml.nvmlSystemGetProcessName(pid)).name
            except self._nvml.NVMLError:
                self._process_names[pid] = "?"
        return self._process_names[pid]
