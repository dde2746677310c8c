"""Stand-ins for Python packages that need a GPU to be built, for machines without them.

A stand-in has the package's functions and allocates what its host code does, in the same order, but computes nothing.
It is used when the script imports the package or requests it from another library; a library that only checks for the
package sees what is installed. An installed package is always used instead.
"""

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType

from tonnage.virtual.standins import StandIns

# The version whose memory each stand-in models.
VERSIONS = {"flash_attn": "2.8.3", "xformers": "0.0.35"}
_HERE = Path(__file__).parent
_INSTALLED = ("site-packages", "dist-packages")


class Packages(MetaPathFinder):
    """Finds stand-ins, after everything that is installed."""

    def __init__(self, stand_ins: StandIns) -> None:
        self._stand_ins = stand_ins
        self._placed: set[str] = set()

    def install(self) -> None:
        """Start answering imports."""
        sys.meta_path.append(self)

    def remove(self) -> None:
        """Remove the stand-ins and their imported modules."""
        sys.meta_path.remove(self)
        for name in [name for name in sys.modules if name.partition(".")[0] in self._placed]:
            del sys.modules[name]

    def place(self, name: str) -> bool:
        """Make the package visible to every library. Returns False if it is installed and needs no stand-in."""
        if name not in self._placed and importlib.util.find_spec(name):
            return False
        if name not in self._placed:
            self._placed.add(name)
            words = f"{name} is not installed: a stand-in allocated what {name} {VERSIONS[name]} does."
            self._stand_ins.assume(name, words)
        return True

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of a stand-in; raise ModuleNotFoundError for a submodule that it lacks."""
        package, _, rest = name.partition(".")
        if package not in VERSIONS:
            return None
        asker = _asker()
        if rest and asker and package in self._placed:  # this finder comes last: no other has such a module
            raise ModuleNotFoundError(
                f"{package} is not installed, and its stand-in has no {name}. Install {package}, or leave {name} out.",
                name=name,
            )
        if not rest and asker and not any(folder in asker for folder in _INSTALLED):
            self.place(package)
        if name not in self._placed:
            return None
        folder = _HERE / name
        return importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        """Return the distributions of the stand-ins in use, for `importlib.metadata`."""
        wanted = (context.name or "").replace("-", "_").lower() if context else ""
        return [_Distribution(name) for name in self._placed if wanted in ("", name)]


class _Distribution(importlib.metadata.Distribution):
    def __init__(self, name: str) -> None:
        self._name = name

    def read_text(self, filename: str) -> str | None:
        if filename == "METADATA":
            return f"Metadata-Version: 2.1\nName: {self._name}\nVersion: {VERSIONS[self._name]}\n"
        return self._name if filename == "top_level.txt" else None

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        return _HERE / path


def _asker() -> str | None:
    """Return the file whose import statement led here, or None if a caller only checks for a module."""
    frame: FrameType | None = sys._getframe(2)
    while frame:
        file = frame.f_code.co_filename
        if file.endswith(("importlib/util.py", "importlib.util>")):
            return None
        if not file.startswith("<frozen ") and "/importlib/" not in file and "/tonnage/virtual/" not in file:
            return file
        frame = frame.f_back
    return None
