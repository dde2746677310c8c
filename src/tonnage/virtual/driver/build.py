"""Builds the stand-in libraries with a C compiler. They depend on CUDA's ABI, but not on torch or Python.

A wheel contains them prebuilt; a source tree builds them once, into the cache. The sources are in `native/`.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tonnage.errors import MissingPart
from tonnage.virtual.cache import built_once, cache_folder, make_safe

NATIVE = Path(__file__).parent / "native"
SHIPPED = Path(__file__).parent / "lib"
CORE = "libtonnage-driver.so"
_CORE_UNITS = ("core.c", "observe.c", "streams.c", "host.c", "kernels.c", "machine_code.c", "draws.c")
_FLAGS = "-shared -fPIC -fvisibility=hidden -fexceptions -std=gnu11 -Wall -Wextra -Wno-unused-parameter -Werror".split()

_STUBS_NEED = """#include <stdlib.h>
void tn_unknown(const char *, const char *);
void tn_launch(void);
void tn_collective(void);"""
# By the kind that `native/names/libraries.toml` lists a function as. No object of ours is larger.
_BODIES = {
    "succeeds": "return 0;",
    "launches": "tn_launch(); return 0;",
    "collectives": "tn_launch(); tn_collective(); return 0;",
    "makes": "*(void **)first = calloc(1, 512); return 0;",
    "frees": "free(first); return 0;",
}


@dataclass(frozen=True)
class Library:
    """One library below torch, as `native/names/libraries.toml` describes it."""

    name: str
    soname: str
    version: str
    not_supported: int
    bodies: Mapping[str, str]  # in C, of functions that succeed without an implementation

    @property
    def functions(self) -> list[str]:
        """All functions that it exports, in any version of CUDA."""
        lines = (NATIVE / "names" / f"{self.name}.txt").read_text().splitlines()
        return [line.split()[0] for line in lines if line and not line.startswith("#")]

    def stub(self, function: str) -> str:
        """Return a weak definition, which a real implementation overrides; one that is not listed fails."""
        body = self.bodies.get(function, f'tn_unknown("{self.name}", "{function}"); return {self.not_supported};')
        return f'__attribute__((weak, visibility("default"))) long {function}(void *first) {{ {body} }}'


def libraries(cuda: int) -> list[Library]:
    """Return all libraries, in loading order."""
    rows = tomllib.loads((NATIVE / "names" / "libraries.toml").read_text())
    found = []
    for name, row in rows.items():
        bodies = {function: body for kind, body in _BODIES.items() for function in row.get(kind, "").split()}
        found.append(Library(name, row["soname"][str(cuda)], row["version"][str(cuda)], row["not_supported"], bodies))
    return found


def library_folder(cuda: int) -> Path:
    """Return the folder with the libraries for this CUDA major version, from the wheel or built on first use."""
    shipped = SHIPPED / f"cuda{cuda}"
    if (shipped / CORE).exists():
        return shipped
    target = cache_folder() / f"driver-{_fingerprint()}-cuda{cuda}"
    return built_once(target, lambda: _build_here(cuda, target))


def build(compiler: Sequence[str], cuda: int, folder: Path) -> None:
    """Compile the core and every library into the folder."""
    core = folder / CORE
    _compile(compiler, core, CORE, [NATIVE / unit for unit in _CORE_UNITS], ["-O1", "-ldl", "-lpthread"])
    with tempfile.TemporaryDirectory() as scratch:

        def link(library: Library) -> None:
            stubs = Path(scratch) / f"{library.name}.c"
            stubs.write_text("\n".join([_STUBS_NEED, *map(library.stub, library.functions)]) + "\n")
            units = sorted(path for path in NATIVE.glob("*.c") if path.stem.split("_")[0] == library.name)
            # Not optimized: these thousands of functions do hardly anything, and compile twice as fast this way.
            flags = ["-O0", f"-DCUDA_MAJOR={cuda}", f"-L{folder}", "-l:" + CORE, "-ldl", f"-I{NATIVE}"]
            if library.version:
                # torch links to versioned symbols, and the loader rejects a library without their version
                script = Path(scratch) / f"{library.name}.map"
                script.write_text(f"{library.version} {{ global: *; }};\n")
                flags.append(f"-Wl,--version-script={script}")
            _compile(compiler, folder / library.soname, library.soname, [*units, stubs], flags)

        with ThreadPoolExecutor() as pool:
            list(pool.map(link, libraries(cuda)))


def _compile(compiler: Sequence[str], target: Path, soname: str, units: list[Path], flags: list[str]) -> None:
    command = [*compiler, *_FLAGS, f"-Wl,-soname,{soname}", "-o", str(target), *map(str, units), *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise MissingPart(
            f"The stand-in for {soname} did not compile:\n{done.stdout[-2000:]}",
            hint="It needs a C compiler for Linux (gcc or clang); a wheel of Tonnage needs none.",
        )


def _build_here(cuda: int, target: Path) -> None:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        raise MissingPart(
            "The stand-ins for CUDA's libraries must be compiled once, and no C compiler was found.",
            hint="Install Tonnage from its wheel, which carries them built, or a C compiler (Debian: apt install gcc).",
        )
    print("tonnage: building the virtual GPU's libraries (once, some seconds) ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        build([compiler], cuda, made)
        make_safe(made)
        made.replace(target)


def _fingerprint() -> str:
    digest = hashlib.sha256(platform.machine().encode())
    for path in (Path(__file__), *sorted(NATIVE.rglob("*"))):
        if path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:20]
