"""List the functions that CUDA libraries export: python tools/list_cuda_names.py --cuda 13 PATH...

A PATH is a wheel, a shared library, a header, or a folder with any of these. A library of NVIDIA's adds the names that
it exports; any other library (torch's, bitsandbytes') adds the names that it imports from NVIDIA's. The driver's library
and NVML come with the driver and not as packages: their names are read from cuda.h and its companions, nvml.h and pynvml.py.

Names are added to those already listed in src/tonnage/virtual/driver/native/names. A name that only one major version of
CUDA has carries that version after it. libraries.toml beside them is written by hand; what it says of a library's SONAME
and symbol version is held against each library that is read.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

NAMES = Path(__file__).parents[1] / "src/tonnage/virtual/driver/native/names"
LIBRARIES = tomllib.loads((NAMES / "libraries.toml").read_text())
# Libraries whose names come from headers belong to the driver, which serves every version of CUDA.
OF_THE_DRIVER = {"cuda", "nvidia-ml"}
# Which library an imported name belongs to where its symbol carries no version.
PREFIXES = {
    r"cu(?!File)[A-Z]\w+": "cuda",
    r"nvml[A-Z]\w+": "nvidia-ml",
    r"(__)?cuda[A-Z]\w+": "cudart",
    r"cusparseLt[A-Z]\w+": "cusparseLt",
    r"curand[A-Z]\w+": "curand",
    r"p?nccl[A-Z]\w+": "nccl",
    r"nvrtc[A-Z]\w+": "nvrtc",
    r"(__)?nvJitLink\w+": "nvJitLink",
    r"cupti[A-Z]\w+": "cupti",
    r"cuFile\w+": "cufile",
    r"nvshmemx?i?_\w+": "nvshmem_host",
}
# Variables, which an importer's symbols do not tell from functions.
VARIABLES = {"nvshmem_selected_device_transport"}
HEADERS = re.compile(r"(cuda|cudaGL|cudaEGL|cudaVDPAU|cudaProfiler|generated_cuda_meta|nvml)\.h|pynvml\.py")

Found = dict[str, set[str]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cuda", choices=["12", "13"], required=True, help="the major version that the paths belong to"
    )
    parser.add_argument(
        "--out", type=Path, default=NAMES, help="folder of the lists (default: where the package has them)"
    )
    parser.add_argument("paths", nargs="+", type=Path)
    options = parser.parse_args()
    found: Found = defaultdict(set)
    with tempfile.TemporaryDirectory() as scratch:
        for path in options.paths:
            if not path.exists():
                sys.exit(f"{path} does not exist. Give a wheel, a shared library or a folder of them.")
            for file in files_in(path, Path(scratch)):
                for library, names in read(file, options.cuda).items():
                    found[library] |= names
    for library, names in sorted(found.items()):
        merge(options.out / f"{library}.txt", names, options.cuda if library not in OF_THE_DRIVER else None)


def files_in(path: Path, scratch: Path) -> Iterator[Path]:
    """Yield the shared libraries and headers under a path; a member of a wheel exists until the next one is asked for."""
    if path.is_dir():
        for inner in sorted(path.rglob("*")):
            if inner.suffix == ".whl" or (inner.is_file() and wanted(inner.name)):
                yield from files_in(inner, scratch)
    elif path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            for member in wheel.infolist():
                if wanted(Path(member.filename).name):
                    unpacked = Path(wheel.extract(member, scratch))
                    yield unpacked
                    unpacked.unlink()
    else:
        yield path


def wanted(name: str) -> bool:
    return bool(re.search(r"\.so(\.\d+)*$", name) or HEADERS.fullmatch(name))


def read(file: Path, cuda: str) -> Found:
    """Read the names that a file adds, by library."""
    if HEADERS.fullmatch(file.name):
        return names_of_header(file)
    stem = re.sub(r"^lib|\.so.*$", "", file.name)
    if stem in LIBRARIES:
        return {stem: exports(file, stem, cuda)}
    return imports(file, cuda)


def exports(file: Path, library: str, cuda: str) -> set[str]:
    """List the functions that a library of NVIDIA's exports, and hold its SONAME and versions against libraries.toml."""
    soname = re.search(r"SONAME.*\[(.+)\]", run("readelf", "-dW", file))
    said = LIBRARIES[library]
    if soname and soname[1] != said["soname"][cuda]:
        sys.exit(
            f"{file.name} has SONAME {soname[1]}; libraries.toml says {said['soname'][cuda]} for CUDA {cuda}. Mend it there."
        )
    names, versions = set(), set()
    for line in run("nm", "-D", "--defined-only", "--with-symbol-versions", file).splitlines():
        kind, symbol = line.split()[-2:]
        name, _, version = symbol.partition("@")
        # C++ names and data are the library's own affair; an "A" is the name of a version.
        if kind in "TWi" and not name.startswith("_Z") and name not in ("_init", "_fini"):
            names.add(name)
            versions.add(version.lstrip("@"))
    if versions != {said["version"][cuda]}:
        sys.exit(
            f"{file.name} has symbol versions {sorted(versions)}; libraries.toml says {said['version'][cuda]!r}. Mend it there."
        )
    return names


def imports(file: Path, cuda: str) -> Found:
    """List the functions that a consumer imports from NVIDIA's libraries, by symbol version or else by prefix."""
    by_version = {said["version"][cuda]: library for library, said in LIBRARIES.items() if said["version"].get(cuda)}
    found: Found = defaultdict(set)
    for line in run("nm", "-D", "--undefined-only", "--with-symbol-versions", file).splitlines():
        kind, symbol = line.split()[-2:]
        name, _, version = symbol.partition("@")
        if kind == "w" or name in VARIABLES:  # weak: the consumer asks whether it is there
            continue
        library = by_version.get(version.lstrip("@"))
        if not version:
            library = next((library for prefix, library in PREFIXES.items() if re.fullmatch(prefix, name)), None)
        if library:
            found[library].add(name)
    return found


def names_of_header(file: Path) -> Found:
    """List the driver's functions that a header declares, renames (`#define cuMemAlloc cuMemAlloc_v2`) or describes."""
    text = re.sub(r"/\*.*?\*/", "", file.read_text(), flags=re.DOTALL)
    if file.name == "pynvml.py":
        return {"nvidia-ml": set(re.findall(r"_nvmlGetFunctionPointer\(\"(\w+)\"\)", text))}
    if file.name == "nvml.h":
        renamed = re.findall(r"#define\s+(nvml[A-Z]\w+)\s+(nvml[A-Z]\w+)\s*$", text, flags=re.MULTILINE)
        return {
            "nvidia-ml": {*re.findall(r"DECLDIR\s+(nvml\w+)\s*\(", text), *(name for pair in renamed for name in pair)}
        }
    names = set(re.findall(r"CUDAAPI\s+(cu\w+)\s*\(", text)) | set(re.findall(r"\b(cu[A-Z]\w+)_params\b", text))
    for before, after in re.findall(r"#define\s+(cu[A-Z]\w+)\s+(cu[A-Z]\w+)\s*$", text, flags=re.MULTILINE):
        names |= {before, after}
    # Per-thread default streams are functions of their own, named by these macros.
    for before, macro, after in re.findall(r"#define\s+(cu[A-Z]\w+)\s+__CUDA_API_(PTDS|PTSZ)\((\w+)\)", text):
        names |= {before, after, f"{after}_{macro.lower()}"}
    return {"cuda": names}


def merge(file: Path, names: set[str], cuda: str | None) -> None:
    """Add names to a list. `cuda` is the version that they belong to, None where it is every one."""
    marks: dict[str, set[str]] = defaultdict(set)
    for line in file.read_text().splitlines() if file.exists() else ():
        name, *mark = line.split()
        marks[name] |= set(mark) or {"12", "13"}
    before = len(marks)
    for name in names:
        marks[name] |= {cuda} if cuda else {"12", "13"}
    lines = (name if len(mark) == 2 else f"{name} {next(iter(mark))}" for name, mark in sorted(marks.items()))
    file.write_text("".join(f"{line}\n" for line in lines))
    print(f"{file.stem}: {len(names)} read, {len(marks) - before} of them new")


def run(*command: str | Path) -> str:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
