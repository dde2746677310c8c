"""The stand-ins for CUDA 12, which torch 2.6 to 2.10 are built for: they load, and nothing that torch imports is missing."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tonnage.virtual.cuda.releases import release_of, release_of_wheel

IMPORTS = Path(__file__).parent / "data" / "cuda12_imports.txt"
LOAD = """
import ctypes, sys
from tonnage.virtual.driver import loading
loading.load(12)
find = ctypes.CDLL(None).dlvsym
find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]
for line in sys.stdin:
    name, _, version = line.strip().partition("@")
    there = find(None, name.encode(), version.encode()) if version else hasattr(ctypes.CDLL(None), name)
    print("found" if there else f"missing {line.strip()}")
"""


def _imports() -> list[str]:
    version, names = "", []
    for line in IMPORTS.read_text().splitlines():
        if line.startswith("["):
            version = line.strip("[]")
        elif not line.startswith("#"):
            names += [f"{name}@{version}" for name in line.split()]
    return names


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_every_symbol_that_torch_imports_is_there_with_its_version() -> None:
    names = _imports()
    assert len(names) > 700
    done = subprocess.run([sys.executable, "-c", LOAD], input="\n".join(names), capture_output=True, text=True)
    assert done.stdout.splitlines() == ["found"] * len(names), done.stdout.replace("found\n", "") + done.stderr[-2000:]


def test_a_wheel_says_what_it_was_built_with() -> None:
    written = [
        "nvidia-cudnn-cu12 (==9.1.0.70) ; platform_system",
        "nvidia-nccl-cu12==2.21.5; x",
        "nvidia-cusparselt-cu12==0.6.2",
    ]
    release = release_of_wheel((2, 6), "12.6", [*written, "numpy", "nvidia-cublas<=13.1.1.3,>=13.1.0.3"])
    assert (release.cuda_number, release.cudnn_number, release.cusparselt, release.nccl) == (
        12060,
        90100,
        602,
        (2, 21, 5),
    )


def test_where_a_wheel_says_nothing_the_table_does() -> None:
    assert release_of_wheel((2, 8), "12.8", []) == release_of((2, 8))


@pytest.mark.parametrize(
    ("version", "cuda"), [((2, 6), "12.4"), ((2, 10), "12.8"), ((2, 11), "13.0"), ((2, 14), "13.0")]
)
def test_versions_between_rows_have_the_row_before(version: tuple[int, int], cuda: str) -> None:
    assert release_of(version).cuda == cuda
