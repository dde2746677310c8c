"""What kernels take, read from fat binaries that nvcc made of data/kernels.cu and from torch's own.

Figures are those of `cuobjdump -res-usage`, without the 1024 bytes of shared memory that the driver reserves from 9.0 on.
"""

import ctypes
import json
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from cuda_build import needs_cuda_build, run
from tonnage.hardware import find_gpu
from tonnage.virtual.compiling.kernels import register_count
from tonnage.virtual.cuda.releases import release_of
from tonnage.virtual.driver import loading
from tonnage.virtual.driver.build import CORE, libraries, library_folder

pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
DATA = Path(__file__).parents[1] / "data"
FAT, ONLY_PTX, CUBIN = ((DATA / name).read_bytes() for name in ("kernels.fatbin", "ptx.fatbin", "kernels.cubin"))
ASSUMED = 32
SetCard = Callable[[str], ctypes.CDLL]
KEPT: list[Any] = []  # what was registered stays so for the life of the process, as a library's own would


class Kernel(ctypes.Structure):
    """`TnKernel` of native/kernels.h."""

    _fields_ = [
        (name, ctypes.c_int32)
        for name in "registers shared_bytes local_bytes constant_bytes threads binary_version ptx_version".split()
    ]


@pytest.fixture
def set_card() -> Iterator[SetCard]:
    """Let the stand-ins be another card."""
    core = ctypes.CDLL(str(library_folder(13) / CORE))
    core.tn_register_binary.restype = ctypes.c_void_p
    core.tn_kernel.restype = core.tn_kernel_of.restype = Kernel
    core.tn_occupancy.argtypes = [Kernel, ctypes.c_int, ctypes.c_int64]
    card = loading.NativeCard.in_dll(core, "tn_card")
    before = bytes(card)

    def set_to(name: str) -> ctypes.CDLL:
        card.memory_bytes = 0
        loading.describe(core, replace(find_gpu(name), overheads={}), release_of((2, 11)), 1)
        card.binary_version = card.major * 10 + card.minor
        core.tn_assumed_kernels()
        return core

    yield set_to
    ctypes.memmove(ctypes.addressof(card), before, len(before))


class Registered:
    """A library with one fat binary, and the answers to what it asks of its kernels."""

    def __init__(self, core: ctypes.CDLL, binary: bytes) -> None:
        self.core = core
        self.binary = ctypes.create_string_buffer(binary, len(binary))
        self.wrapper = ctypes.create_string_buffer(
            struct.pack("<IIQQ", 0x466243B1, 1, ctypes.addressof(self.binary), 0)
        )
        self._handle = ctypes.c_void_p(core.tn_register_binary(self.wrapper))

    def ask(self, name: str) -> Kernel:
        """What the kernel takes."""
        self.host, text = ctypes.create_string_buffer(8), ctypes.c_char_p(name.encode())
        KEPT.extend((self.binary, self.wrapper, self.host, text))
        self.core.tn_register_kernel(self._handle, self.host, text)
        kernel: Kernel = self.core.tn_kernel(self.host)
        return kernel

    @property
    def was_assumed(self) -> bool:
        """Whether an answer since this was last asked was an assumption."""
        return bool(self.core.tn_assumed_kernels())


@pytest.mark.parametrize(
    ("card", "runs", "spilling"),
    [
        ("a100-80", 80, (8, 0, 256)),
        ("rtx-4090", 80, (8, 0, 256)),
        ("h200", 90, (14, 4096, 256)),  # sm_90a, though sm_90 is there too
        ("b200", 100, (8, 0, 256)),
        ("b300", 100, (8, 0, 256)),  # sm_100f runs on the whole family
    ],
)
def test_the_code_that_the_card_runs_is_read(
    set_card: SetCard, card: str, runs: int, spilling: tuple[int, int, int]
) -> None:
    library = Registered(set_card(card), FAT)
    kernel = library.ask("spilling")
    assert (kernel.registers, kernel.shared_bytes, kernel.local_bytes) == spilling
    assert (kernel.binary_version, kernel.ptx_version, kernel.constant_bytes) == (runs, runs, 40)
    bounded, plain = library.ask("bounded"), library.ask("plain")
    assert (bounded.registers, bounded.shared_bytes, bounded.local_bytes, bounded.threads) == (10, 1024, 0, 256)
    assert (plain.registers, plain.shared_bytes, plain.threads) == (8, 0, 1024)
    assert not library.was_assumed


def test_code_is_read_once(set_card: SetCard) -> None:
    library = Registered(set_card("h200"), FAT)
    first = library.ask("bounded")
    ctypes.memset(library.binary, 0, len(FAT))
    assert bytes(library.ask("bounded")) == bytes(first)


def test_one_cubin_and_a_bare_fat_binary_are_modules(set_card: SetCard) -> None:
    core = set_card("rtx-a6000")
    module = ctypes.create_string_buffer(CUBIN)
    kernels = {name: core.tn_kernel_of(module, name.encode(), 0) for name in ("plain", "bounded", "spilling")}
    assert [kernel.registers for kernel in kernels.values()] == [8, 10, 8]
    assert max(kernel.registers for kernel in kernels.values()) == register_count(CUBIN)
    assert {(kernel.binary_version, kernel.ptx_version) for kernel in kernels.values()} == {(86, 80)}
    bare = ctypes.create_string_buffer(FAT)
    assert core.tn_kernel_of(bare, b"plain", 0).binary_version == 80


def test_before_cuda_13_the_flags_tell_both_architectures(set_card: SetCard) -> None:
    older = bytearray(CUBIN.replace(b".note.nv.cuinfo", b".note.nv.nothin"))
    older[8] = 7
    struct.pack_into("<I", older, 0x30, 0x00500556)
    module = ctypes.create_string_buffer(bytes(older))
    kernel = set_card("rtx-a6000").tn_kernel_of(module, b"plain", 0)
    assert (kernel.registers, kernel.binary_version, kernel.ptx_version) == (8, 86, 80)


def _lz4(code: bytes) -> bytes:
    """A block of LZ4 in which every longer run of one byte is a copy of its first."""

    def length(count: int) -> bytes:
        return b"" if count < 15 else bytes([255] * ((count - 15) // 255) + [(count - 15) % 255])

    block, literals = b"", b""
    for _, run_of in groupby(code):
        run_bytes = bytes(run_of)
        literals += run_bytes[:1]
        if (copied := len(run_bytes) - 1) < 8:
            literals += run_bytes[1:]
            continue
        token = min(len(literals), 15) << 4 | min(copied - 4, 15)
        block += bytes([token]) + length(len(literals)) + literals + b"\1\0" + length(copied - 4)
        literals = b""
    return block + bytes([min(len(literals), 15) << 4]) + length(len(literals)) + literals


def _fat_binary(code: bytes, flags: int, unpacked_size: int) -> bytes:
    """A fat binary with code for 8.6."""
    entry = struct.pack(
        "<HHIQIIHHIIIQQQ", 2, 0x101, 64, len(code), len(code), 0, 8, 1, 86, 0, 0, flags, 0, unpacked_size
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entry) + len(code)) + entry + code


def test_code_packed_with_lz4_is_read(set_card: SetCard) -> None:
    packed = _lz4(CUBIN)
    assert len(packed) < 0.8 * len(CUBIN)
    library = Registered(set_card("rtx-a6000"), _fat_binary(packed, 0x2011, len(CUBIN)))
    assert library.ask("bounded").registers == 10


@pytest.mark.parametrize(
    "broken",
    [
        b"\x1f", b"\xf0\xff", b"\x10a\x05\x00", b"\x10a\x00\x00", b"\x1fa\x01\x00" + b"\xff" * 99, b"\x10a\x01", b"\x10a",
        _lz4(CUBIN)[:-1], _lz4(CUBIN[:-1]), _lz4(CUBIN + b"abc"),
    ],
)  # fmt: skip
def test_broken_lz4_gives_an_assumption(set_card: SetCard, broken: bytes) -> None:
    library = Registered(set_card("rtx-a6000"), _fat_binary(broken, 0x2011, len(CUBIN)))
    assert library.ask("bounded").registers == ASSUMED
    assert library.was_assumed


def _damaged(whole: bytes, at: int, value: bytes) -> bytes:
    return whole[:at] + value + whole[at + len(value) :]


@pytest.mark.parametrize(
    "binary",
    [
        b"\0" * 64, FAT[:16], _damaged(FAT, 0, b"junk"), _damaged(FAT, 8, b"\xff" * 8), _damaged(FAT, 16 + 4, b"\0" * 4),
        _damaged(FAT, 16 + 4, b"\xff" * 4), _damaged(FAT, 16 + 8, b"\xff" * 8), _fat_binary(CUBIN[:2000], 0x11, 0),
        _fat_binary(_damaged(CUBIN, 0x28, b"\xff" * 8), 0x11, 0), _fat_binary(_damaged(CUBIN, 0x3C, b"\xff" * 4), 0x11, 0),
        _fat_binary(b"\x28\xb5\x2f\xfd" + b"junk" * 9, 0x8011, 1 << 40), _fat_binary(b"junk" * 9, 0x8011, 4096),
    ],
)  # fmt: skip
def test_a_broken_fat_binary_gives_an_assumption(set_card: SetCard, binary: bytes) -> None:
    library = Registered(set_card("rtx-a6000"), binary)
    kernel = library.ask("plain")
    assert library.was_assumed
    assert (kernel.registers, kernel.threads, kernel.binary_version) == (ASSUMED, 1024, 86)


def test_damage_anywhere_crashes_nothing(set_card: SetCard) -> None:
    core = set_card("rtx-a6000")
    whole = _fat_binary(CUBIN, 0x11, 0)
    for at in range(0, len(whole), 13):
        for value in (b"\xff" * 8, b"\0" * 8, b"\x80"):
            module = ctypes.create_string_buffer(_damaged(whole, at, value), len(whole))
            core.tn_kernel_of(module, b"bounded", 0)


def test_a_fat_binary_that_is_not_there_gives_an_assumption(set_card: SetCard) -> None:
    library = Registered(set_card("h200"), FAT)
    struct.pack_into("<Q", library.wrapper, 8, 1 << 46)
    assert library.ask("plain").registers == ASSUMED


def test_a_kernel_that_the_driver_would_compile_is_assumed_and_knows_its_ptx(set_card: SetCard) -> None:
    library = Registered(set_card("rtx-5090"), ONLY_PTX)
    kernel = library.ask("plain")
    assert (kernel.registers, kernel.ptx_version, kernel.binary_version) == (ASSUMED, 80, 120)
    assert library.was_assumed


def test_the_runtime_and_the_driver_give_the_same_figures(set_card: SetCard) -> None:
    library = Registered(set_card("a100-80"), FAT)
    kernel = library.ask("spilling")
    sonames = {each.name: each.soname for each in libraries(13)}
    runtime, driver = (ctypes.CDLL(str(library_folder(13) / sonames[name])) for name in ("cudart", "cuda"))
    attributes = (ctypes.c_size_t * 32)()
    assert runtime.cudaFuncGetAttributes(attributes, library.host) == 0
    assert attributes[:3] == [kernel.shared_bytes, kernel.constant_bytes, kernel.local_bytes] == [0, 40, 256]
    function, value = ctypes.c_void_p(), ctypes.c_int()
    assert driver.cuModuleGetFunction(ctypes.byref(function), library.wrapper, b"spilling") == 0
    for attribute, size in {0: 1024, 1: 0, 2: 40, 3: 256, 4: kernel.registers, 5: 80, 6: 80}.items():
        assert driver.cuFuncGetAttribute(ctypes.byref(value), attribute, function) == 0
        assert value.value == size


@pytest.mark.parametrize(
    ("card", "registers", "shared_bytes", "threads", "dynamic_bytes", "blocks"),
    [
        # What NVIDIA's cuda_occupancy.h (CUDA 13.0) answers.
        ("h200", 32, 0, 256, 0, 8), ("h200", 33, 0, 256, 0, 6), ("h200", 72, 8192, 128, 0, 7),
        ("h200", 255, 0, 256, 0, 1), ("h200", 255, 0, 288, 0, 0), ("h200", 16, 44, 32, 0, 32),
        ("h200", 16, 0, 128, 100000, 2), ("h200", 16, 49152, 128, 0, 4), ("h200", 32, 0, 1025, 0, 0),
        ("a100-80", 30, 44, 256, 0, 8), ("a100-80", 34, 44, 256, 0, 6), ("a100-80", 16, 32768, 128, 0, 4),
        ("rtx-4090", 40, 44, 256, 0, 6), ("rtx-4090", 16, 0, 32, 0, 24), ("rtx-4090", 64, 12304, 128, 0, 7),
        ("t4", 50, 44, 256, 0, 4), ("t4", 68, 32768, 256, 0, 2), ("t4", 16, 0, 32, 0, 16),
        ("b200", 96, 0, 160, 0, 4), ("rtx-5090", 34, 44, 256, 0, 6),
    ],
)  # fmt: skip
def test_occupancy(
    set_card: SetCard, card: str, registers: int, shared_bytes: int, threads: int, dynamic_bytes: int, blocks: int
) -> None:
    kernel = Kernel(registers=registers, shared_bytes=shared_bytes)
    assert set_card(card).tn_occupancy(kernel, threads, dynamic_bytes) == blocks


@pytest.mark.parametrize(("registers", "threads"), [(32, 1024), (64, 1024), (65, 896), (128, 512), (255, 256)])
def test_registers_limit_the_threads_of_a_block(set_card: SetCard, registers: int, threads: int) -> None:
    attribute, code = struct.pack("<BBH", 4, 0x2F, 8), CUBIN
    at = code.index(attribute)
    while at >= 0:  # every kernel of the file
        code = _damaged(code, at + 8, struct.pack("<I", registers))
        at = code.find(attribute, at + 12)
    kernel = set_card("rtx-a6000").tn_kernel_of(ctypes.create_string_buffer(code), b"plain", 0)
    assert (kernel.registers, kernel.threads) == (registers, threads)


@needs_cuda_build
def test_kernels_of_torch_take_what_cuobjdump_says(tmp_path: Path) -> None:
    """Those of torch 2.11.0+cu130 for sm_90, asked for by operators on several threads at once."""
    cub, pairs = "_ZN14at_cuda_detail3cub6detail", "INS1_5radix10policy_hubIfN2at4cuda3cub6detail10OpaqueTypeILi8EEEyE"
    figures = {
        f"{cub}11EmptyKernelIvEEvv": [4, 0, 0, 1024, 90, 90],
        f"{cub}10radix_sort30DeviceRadixSortHistogramKernel{pairs}10Policy1000ELNS0_9SortOrderE0EfyNS1_"
        "21identity_decomposer_tEEEvPT2_PKT1_SG_iiT3_": [32, 4096, 0, 128, 90, 90],
        f"{cub}10radix_sort29DeviceRadixSortOnesweepKernel{pairs}10Policy1000ELNS0_9SortOrderE0EfSB_yiiNS1_"
        "21identity_decomposer_tEEEvPT5_SH_PT3_PKSI_PT1_PKSM_PT2_PKSQ_T4_iiT6_": [80, 45056, 0, 384, 90, 90],
        "_ZN2at6native20bitonicSortKVInPlaceILi2ELin1ELi16ELi16EflNS0_4LTOpIfLb1EEEjEEvNS_4cuda6detail10TensorInfoIT3_T6_EE"
        "S8_S8_S8_NS6_IT4_S8_EES8_T5_": [39, 6656, 0, 256, 90, 90],
    }
    script = Path(__file__).parent / "scripts" / "asks_kernels.py"
    done = run("--gpu", "h200", "-v", script, *figures, folder=tmp_path)
    assert json.loads(done.stdout.splitlines()[0]) == figures, done.stderr
    assert "registers a thread" not in done.stdout
