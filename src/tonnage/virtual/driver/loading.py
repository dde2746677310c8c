"""Loads the stand-in libraries before torch, so that the dynamic loader resolves torch's dependencies to them.

A CUDA build of torch finds its libraries by soname, and the first one loaded under a name is used. Nothing here
imports torch.
"""

import ctypes
import importlib.util
import os
import re
import sys
import uuid
from dataclasses import replace
from functools import cache
from importlib.metadata import Distribution
from pathlib import Path

from tonnage.errors import MissingPart
from tonnage.hardware import Gpu
from tonnage.virtual.cuda.releases import TorchRelease, release_of_wheel
from tonnage.virtual.driver.build import CORE, libraries, library_folder

# CUDA's limit of resident blocks, by compute capability (CUDA programming guide, table of technical specifications).
_BLOCKS_PER_SM = {(7, 5): 16, (8, 6): 16, (8, 7): 16, (8, 9): 24, (12, 0): 24, (12, 1): 24}
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "tonnage")


class NativeCard(ctypes.Structure):
    """`TnCard` of native/core.h."""

    _fields_ = [
        ("name", ctypes.c_char * 256),
        ("uuid", ctypes.c_uint8 * 16),
        *((name, ctypes.c_int64) for name in ("memory_bytes", "shared_per_block", "shared_per_block_optin", "shared_per_sm")),
        *(
            (name, ctypes.c_int32)
            for name in "major minor binary_version sm_count threads_per_sm threads_per_block blocks_per_sm registers_per_sm "
            "clock_khz memory_clock_khz memory_bus_bits l2_bytes driver_version runtime_version devices".split()
        ),
        *((name, ctypes.c_int64) for name in ("memory_rate", "link_rate", "matrix_rate")),
    ]  # fmt: skip


def torch_root() -> Path:
    """Return the folder of the installed torch."""
    spec = importlib.util.find_spec("torch")
    if not spec or not spec.origin:
        raise MissingPart("The virtual GPU needs PyTorch.", hint="Install it: pip install 'tonnage[torch]'")
    return Path(spec.origin).parent


def is_cuda_build(root: Path) -> bool:
    """Whether this torch was built for CUDA."""
    return (root / "lib" / "libtorch_cuda.so").exists()


def installed_version(root: Path) -> tuple[str, str]:
    """Return the versions of torch and of the CUDA it was built for, without importing torch."""
    text = (root / "version.py").read_text()
    found = {name: re.search(rf"^{name}[^=\n]*= ['\"]([^'\"]+)['\"]", text, re.M) for name in ("__version__", "cuda")}
    return tuple(match.group(1) if match else "" for match in found.values())  # type: ignore[return-value]


def installed_cuda() -> int:
    """Return the major version of the CUDA that the installed torch was built for."""
    return int(installed_version(torch_root())[1].split(".")[0])


@cache
def installed_release() -> TorchRelease:
    """Return the versions that the installed torch was built with."""
    root = torch_root()
    version, cuda = installed_version(root)
    major, minor = (int(number) for number in version.split(".")[:2])
    described = Distribution.discover(name="torch", path=[str(root.parent)])
    requirements = next((found.requires or [] for found in described), [])
    return replace(release_of_wheel((major, minor), cuda, requirements), torch=(major, minor))


@cache
def load(cuda_major: int) -> ctypes.CDLL:
    """Load every stand-in library under the name that torch looks for, and return their core."""
    if "torch" in sys.modules:
        raise MissingPart(
            "torch was imported before the virtual GPU, so it has looked for a real one already.",
            hint="Enter the virtual GPU before the first `import torch`, or use `tonnage run`.",
        )
    folder = library_folder(cuda_major)
    core = ctypes.CDLL(str(folder / CORE), mode=ctypes.RTLD_GLOBAL)
    ctypes.c_int.in_dll(core, "tn_cuda_major").value = cuda_major
    for library in libraries(cuda_major):
        ctypes.CDLL(str(folder / library.soname), mode=ctypes.RTLD_GLOBAL)
    # Triton links its launchers against libcuda, and child processes look for it by name.
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    return core


def is_loaded() -> bool:
    """Whether this process has loaded the stand-ins."""
    return load.cache_info().currsize > 0


def prepare(gpu: Gpu, devices: int = 1) -> ctypes.CDLL:
    """Load the stand-ins for the installed torch and configure them as this card."""
    core = load(installed_cuda())
    describe(core, gpu, installed_release(), devices)
    return core


def describe(core: ctypes.CDLL, gpu: Gpu, release: TorchRelease, devices: int) -> None:
    """Configure the stand-ins as this card. A process can have only one: torch caches the properties."""
    card = NativeCard.in_dll(core, "tn_card")
    if card.memory_bytes:
        if card.name != gpu.name.encode():
            raise MissingPart(
                f"This process has a virtual {card.name.decode()} already, and torch does not ask twice what its card is.",
                hint=f"Use the {gpu.name} in a process of its own.",
            )
        return
    card.name = gpu.name.encode()
    card.uuid[:] = uuid.uuid5(_NAMESPACE, f"{gpu.key}/0").bytes
    card.memory_bytes = gpu.memory_bytes
    card.shared_per_block = gpu.shared_memory_per_block_bytes
    card.shared_per_block_optin = gpu.shared_memory_per_block_optin_bytes
    card.shared_per_sm = gpu.shared_memory_per_sm_bytes
    card.major, card.minor = gpu.compute_capability
    card.sm_count, card.blocks_per_sm = gpu.sm_count, _BLOCKS_PER_SM.get(gpu.compute_capability, 32)
    card.threads_per_sm, card.threads_per_block = gpu.max_threads_per_sm, gpu.max_threads_per_block
    card.registers_per_sm = gpu.registers_per_sm
    card.clock_khz, card.memory_clock_khz = gpu.clock_mhz * 1000, gpu.memory_clock_mhz * 1000
    card.memory_bus_bits, card.l2_bytes = gpu.memory_bus_bits, gpu.l2_bytes
    card.driver_version = card.runtime_version = release.cuda_number
    card.devices = devices
    card.memory_rate, card.link_rate = int(gpu.bandwidth_bytes_per_s), int(gpu.pcie_bytes_per_s)
    card.matrix_rate = int(max(gpu.rates.get(name, 0.0) for name in ("bf16", "fp16", "fp32")))
    for name, overhead in gpu.overheads.items():
        core.tn_set_part(name.encode(), ctypes.c_int64(overhead.size_bytes))
    core.tn_use(b"context")


def choose_code(core: ctypes.CDLL, gpu: Gpu, torch_version: str, architectures: str) -> None:
    """Choose the newest machine code in this torch that the card runs; raise MissingPart if there is none.

    A card runs machine code of its own major version and no newer minor one, and whatever its driver compiles from
    PTX.
    """
    major, minor = gpu.compute_capability
    own = major * 10 + minor
    built = {kind: [int(n) for n in re.findall(rf"{kind}_(\d+)", architectures)] for kind in ("sm", "compute")}
    fitting = [n for n in built["sm"] if n // 10 == major and n <= own] or [n for n in built["compute"] if n <= own]
    if not fitting:
        raise MissingPart(
            f"The installed torch {torch_version} has no kernels for the {gpu.name} (compute capability {major}.{minor}), "
            f"on a real card either: it was built for {architectures}.",
            hint="Install a torch that was built for it, or name another card.",
        )
    NativeCard.in_dll(core, "tn_card").binary_version = max(fitting)
