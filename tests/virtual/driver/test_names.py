"""The lists of functions that the stand-in libraries export."""

import re
import tomllib

import pytest

from tonnage.virtual.driver.build import NATIVE

NAMES = NATIVE / "names"
LIBRARIES = tomllib.loads((NAMES / "libraries.toml").read_text())


def test_every_library_has_a_list_and_every_list_a_library() -> None:
    assert {file.stem for file in NAMES.glob("*.txt")} == set(LIBRARIES)


@pytest.mark.parametrize("library", LIBRARIES)
def test_library_is_described_for_both_versions_of_cuda(library: str) -> None:
    row = LIBRARIES[library]
    assert row["soname"].keys() == row["version"].keys() == {"12", "13"}
    assert all(re.fullmatch(rf"lib{library}\.so\.\d+", soname) for soname in row["soname"].values())
    assert row["not_supported"] > 0  # never success


@pytest.mark.parametrize("library", LIBRARIES)
def test_names_are_sorted_functions_with_a_version_at_most(library: str) -> None:
    lines = (NAMES / f"{library}.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[A-Za-z_]\w*( 12| 13)?", line) for line in lines)
    names = [line.split()[0] for line in lines]
    assert names == sorted(set(names))


@pytest.mark.parametrize("library", LIBRARIES)
def test_functions_that_do_nothing_are_listed_once_and_have_no_implementation(library: str) -> None:
    kinds = ("succeeds", "launches", "makes", "frees")
    functions = [name for kind in kinds for name in LIBRARIES[library].get(kind, "").split()]
    listed = {line.split()[0] for line in (NAMES / f"{library}.txt").read_text().splitlines()}
    written = "".join(path.read_text() for path in NATIVE.glob("*.c") if path.stem.split("_")[0] == library)
    assert len(functions) == len(set(functions)) and set(functions) <= listed
    assert not [name for name in functions if re.search(rf"\b{name}\(.*\) {{", written)]


@pytest.mark.parametrize(
    ("library", "names"),
    [
        ("cudart", "cudaMalloc __cudaRegisterFatBinary cudaGetDeviceProperties cudaGetDeviceProperties_v2"),
        ("cuda", "cuMemAlloc cuMemAlloc_v2 cuMemcpyAsync_ptsz cuGetProcAddress_v2 cuGetExportTable"),
        ("cublas", "cublasCreate_v2 cublasGemmEx_64"),
        ("nvidia-ml", "nvmlInit nvmlInit_v2 nvmlDeviceGetMemoryInfo_v2"),
        ("nccl", "ncclCommInitRankConfig pncclAllReduce"),
        ("cufile", "cuFileRead"),
    ],
)
def test_names_that_consumers_import_are_there(library: str, names: str) -> None:
    listed = {line.split()[0] for line in (NAMES / f"{library}.txt").read_text().splitlines()}
    assert set(names.split()) <= listed
