"""Loads Tonnage's modules with the probes that `tools/coverage_probes.py` put into them. Python imports this file when it starts.

A probe writes a byte into a file that all processes map, so nothing is written at exit: what forked, killed and abandoned processes
ran counts too.
"""

import builtins
import marshal
import mmap
import os
from importlib.machinery import PathFinder, SourcelessFileLoader


# Not a loader of sources: pytest compiles those of its plugins' packages anew, to rewrite their assertions.
class _ProbedLoader(SourcelessFileLoader):
    """Gives a module its code with probes."""

    def __init__(self, fullname, path, code):
        super().__init__(fullname, path)
        self._code = code

    def get_code(self, fullname):
        with open(self._code, "rb") as file:
            return marshal.load(file)

    def exec_module(self, module):
        # torch.compile, which traces some of them, knows globals, and refuses what is among the builtins.
        module.__dict__["__hits__"] = builtins.__hits__
        super().exec_module(module)


def _install(folder):
    """Have PathFinder, which pytest and its own finder ask too, name the loader above."""
    with open(os.path.join(folder, "hits"), "r+b") as file:
        builtins.__hits__ = mmap.mmap(file.fileno(), 0)  # for `python -m`, whose globals are new
    find_spec = PathFinder.find_spec

    def find_probed(cls, fullname, path=None, target=None):
        spec = find_spec(fullname, path, target)
        if spec and spec.origin and fullname.partition(".")[0] == "tonnage":
            code = os.path.join(folder, spec.origin.replace(os.sep, "+"))
            if os.path.exists(code):
                spec.loader = _ProbedLoader(fullname, spec.origin, code)
        return spec

    PathFinder.find_spec = classmethod(find_probed)


if os.path.isdir(_folder := os.environ.get("TONNAGE_PROBES", "")):
    _install(_folder)
