"""Builds the native library with a C compiler. It depends on Linux, but not on torch or Python.

A wheel contains it prebuilt; a source tree builds it once, into the cache.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tonnage.errors import MissingPart
from tonnage.virtual.cache import built_once, cache_folder, make_safe

NATIVE = Path(__file__).parent / "native"
SHIPPED = Path(__file__).parent / "lib"
LIBRARY = "libtonnage-redirect.so"
_FLAGS = "-shared -fPIC -fvisibility=hidden -std=gnu11 -O1 -Wall -Wextra -Wno-format-truncation".split()


def library_path() -> Path:
    """Return the path of the library, from the wheel or built on first use."""
    if (SHIPPED / LIBRARY).exists():
        return SHIPPED / LIBRARY
    target = cache_folder() / f"redirect-{_fingerprint()}.so"
    return built_once(target, lambda: _build_here(target))


def build(compiler: Sequence[str], target: Path) -> None:
    """Compile the library."""
    units = sorted(map(str, NATIVE.glob("*.c")))
    command = [*compiler, *_FLAGS, "-o", str(target), *units, "-ldl", "-lpthread"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise MissingPart(
            f"The library that redirects a script's writes did not compile:\n{done.stdout[-2000:]}",
            hint="It needs a C compiler for Linux (gcc or clang); a wheel of Tonnage needs none.",
        )


def _build_here(target: Path) -> None:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        raise MissingPart(
            "The library that keeps a virtual run from changing your files must be compiled once, and no C compiler "
            "was found.",
            hint="Install Tonnage from its wheel, which carries it built, or a C compiler (Debian: apt install gcc); "
            "or let the script write in place, with --write.",
        )
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = Path(scratch) / LIBRARY
        build([compiler], built)
        make_safe(built)
        built.replace(target)


def _fingerprint() -> str:
    digest = hashlib.sha256(f"{platform.machine()} {platform.libc_ver()}".encode())
    for path in (Path(__file__), *sorted(NATIVE.iterdir())):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:20]
