"""Builds and caches the virtual GPU's native library, once for each combination of torch, Python and compiler.

The sources are in `native/`.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from tonnage.errors import MissingPart
from tonnage.virtual.cache import built_once, cache_folder, make_safe

NATIVE = Path(__file__).parent / "native"
UNITS = tuple(path.name for path in sorted(NATIVE.glob("*.cpp")))
# Shared with the stand-ins for CUDA's libraries.
SHARED = NATIVE.parent / "driver" / "native" / "draws.c"


def native_library(torch_root: Path) -> Path:
    """Return the path of the native library for this torch, building it on first use."""
    target = cache_folder() / f"tonnage-{_fingerprint(torch_root)}.so"
    return built_once(target, lambda: _build(torch_root, target))


def _fingerprint(torch_root: Path) -> str:
    digest = hashlib.sha256()
    for unit in (*sorted(NATIVE.iterdir()), SHARED):
        digest.update(unit.read_bytes())
    digest.update((torch_root / "version.py").read_bytes())
    digest.update(f"{torch_root} {sys.version} {platform.machine()}".encode())
    return digest.hexdigest()[:20]


def _build(torch_root: Path, target: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise MissingPart(
            "The virtual GPU has a small native half that must be compiled once, and no C++ compiler was found.",
            hint="Install g++ (Debian: apt install g++) or set CXX to a C++20 compiler.",
        )
    print("tonnage: building the virtual GPU for this torch (once, about a minute) ...", file=sys.stderr, flush=True)
    include, libraries = torch_root / "include", torch_root / "lib"
    flags = ["-std=c++20", "-O1", "-fPIC", f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"]
    flags += [f"-I{sysconfig.get_paths()['include']}"]
    linked = [f"-L{libraries}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{libraries}"]
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = {unit: str(Path(scratch) / f"{unit}.o") for unit in UNITS}
        jobs = {u: _start([compiler, *flags, "-c", str(NATIVE / u), "-o", objects[u]]) for u in UNITS}
        for unit, job in jobs.items():
            _wait(job, unit)
        built = Path(scratch) / target.name
        _wait(_start([compiler, "-shared", "-o", str(built), *objects.values(), *linked]), "link")
        make_safe(built)
        built.replace(target)


def _start(command: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _wait(job: "subprocess.Popen[str]", what: str) -> None:
    output, _ = job.communicate()
    if job.returncode:
        raise MissingPart(
            f"The virtual GPU's native half did not compile ({what}):\n{output[-2000:]}",
            hint="It needs a C++20 compiler (g++ 11 or newer), Python's headers and a CPU build of torch 2.11 or later.",
        )
