"""Builds the stand-in CUDA libraries, and the library that redirects a script's writes, into a wheel, so that whoever
installs it needs no compiler.

    pip wheel .                                       for this machine, with its own C compiler or zig
    TONNAGE_TARGET=aarch64-linux-gnu pip wheel .      for that machine, with zig (fetched as the package `ziglang`)
    TONNAGE_TARGET=any pip wheel .                    a pure one, for macOS and whatever else has neither

Without a C compiler, and where the machine does not run Linux, the wheel is a pure one that builds them on first use.
An editable install builds nothing.
"""

import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VERSIONS_OF_CUDA = (12, 13)
MACHINES = ("x86_64", "aarch64")
# The C library of manylinux_2_17, which every Linux that PyTorch supports has.
GLIBC = "2.17"


class StandInLibraries(BuildHookInterface):
    def dependencies(self) -> list[str]:
        """Ask for zig where a target is named; any other build takes what is there."""
        return ["ziglang"] if os.environ.get("TONNAGE_TARGET", "any") != "any" else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the libraries and add them to the wheel."""
        if version == "editable":
            return
        compiler, tag = find_compiler(os.environ.get("TONNAGE_TARGET", ""))
        if not compiler:
            self.app.display_warning(f"A pure wheel, without native libraries: {tag}")
            return
        # The package that is being built has the code that compiles them.
        sys.path.insert(0, str(Path(self.root) / "src"))
        from tonnage.virtual.driver import build as stand_ins
        from tonnage.virtual.redirect import build as redirection

        self.folder = tempfile.mkdtemp(prefix="tonnage-libraries-")
        stand_in_folder = Path(self.folder) / "driver"
        for cuda in VERSIONS_OF_CUDA:
            made = stand_in_folder / f"cuda{cuda}"
            made.mkdir(parents=True)
            stand_ins.build(compiler, cuda, made)
        redirection_folder = Path(self.folder) / "redirect"
        redirection_folder.mkdir()
        redirection.build(compiler, redirection_folder / redirection.LIBRARY)
        source = Path(self.root) / "src"
        build_data["force_include"] |= {
            str(stand_in_folder): stand_ins.SHIPPED.relative_to(source).as_posix(),
            str(redirection_folder): redirection.SHIPPED.relative_to(source).as_posix(),
        }
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{tag}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled: the wheel has it now."""
        shutil.rmtree(getattr(self, "folder", ""), ignore_errors=True)


def find_compiler(target: str) -> tuple[list[str], str]:
    """Choose the compiler for a target ("" for this machine) and the wheel's platform tag; or none, and the reason."""
    if target == "any":
        return [], "it was asked for."
    machine = target.split("-")[0] if target else platform.machine()
    if target and target not in [f"{machine}-linux-gnu" for machine in MACHINES]:
        known = " and ".join(f"{machine}-linux-gnu" for machine in MACHINES)
        raise ValueError(f"TONNAGE_TARGET is {target!r}; the targets are {known}, and any for a pure wheel.")
    if not target and (sys.platform != "linux" or machine not in MACHINES):
        return [], f"they are for Linux on {' and '.join(MACHINES)}, and this is {sys.platform} on {machine}."
    # zig links against the oldest C library that we support, the machine's compiler against the machine's own.
    if importlib.util.find_spec("ziglang"):
        zig = [sys.executable, "-m", "ziglang", "cc", "-s", "-target", f"{machine}-linux-gnu.{GLIBC}"]
        return zig, f"manylinux_{GLIBC.replace('.', '_')}_{machine}"
    own = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if target:
        raise ValueError(
            f"TONNAGE_TARGET is {target}, and ziglang, which compiles for it, is not installed. Install it."
        )
    return ([own], f"linux_{machine}") if own else ([], "no C compiler was found. Install gcc, or ziglang from PyPI.")
