"""Loads Tonnage's modules with the probes that `tools/coverage_probes.py` put into them. Python imports this file when it starts.

A probe writes a byte into a file that all processes map, so nothing is written at exit: what forked, killed and abandoned processes
ran counts too.
"""

import marshal
import mmap
import os
from importlib.machinery import PathFinder, SourcelessFileLoader


# Not a loader of sources: pytest compiles those of its plugins' packages anew, to rewrite their assertions.
class _ProbedLoader(SourcelessFileLoader):
    """Gives a module its code with probes, and the mapped bytes that they write to."""

    def __init__(self, fullname, path, code, hits):
        super().__init__(fullname, path)
        self._code, self._hits = code, hits

    def get_code(self, fullname):
        with open(self._code, "rb") as file:
            return marshal.load(file)

    def exec_module(self, module):
        module.__dict__["__hits__"] = self._hits
        super().exec_module(module)


def _install(folder):
    """Have PathFinder, which pytest and its own finder ask too, name the loader above."""
    with open(os.path.join(folder, "hits"), "r+b") as file:
        hits = mmap.mmap(file.fileno(), 0)
    find_spec = PathFinder.find_spec

    def find_probed(cls, fullname, path=None, target=None):
        spec = find_spec(fullname, path, target)
        if spec and spec.origin and fullname.partition(".")[0] == "tonnage":
            code = os.path.join(folder, spec.origin.replace(os.sep, "+"))
            if os.path.exists(code):
                spec.loader = _ProbedLoader(fullname, spec.origin, code, hits)
        return spec

    PathFinder.find_spec = classmethod(find_probed)


if os.path.isdir(_folder := os.environ.get("TONNAGE_PROBES", "")):
    _install(_folder)
