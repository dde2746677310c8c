"""Finds the script's own line in a stack of frames, as opposed to lines of libraries, Python and Tonnage.

Frames of some functions also determine the phase (`torch.save`, `generate`); they are listed in `data/phases.toml`.
"""

import os
import site
import sys
import sysconfig
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_RUNNER = os.path.join(_OURS, "script", "running.py")  # frames below it started us, and are not the script's
_OF_TORCH = ("torch", "functorch", "triton")
_PHASES = Path(__file__).parent / "data" / "phases.toml"


class ScriptPlace(NamedTuple):
    """Where a program is: the script's innermost line, and its callers."""

    line: str
    # Lines of the script ("train.py:88") and of libraries ("transformers/trainer.py:1894"), innermost first.
    # PyTorch's own, dozens deep for every module, are left out.
    stack: tuple[str, ...]
    # The phase that a function on the stack determines: "saving", "generation", ...
    phase: str = ""


@cache
def telling_functions() -> dict[str, dict[str, str]]:
    """Return the phases determined by functions, by file and name."""
    found: dict[str, dict[str, str]] = {}
    for phase, files in _phases().items():
        for file, names in files.items():
            found.setdefault(file, {}).update(dict.fromkeys(names, phase))
    return found


@cache
def _phases() -> dict[str, dict[str, list[str]]]:
    return tomllib.loads(_PHASES.read_text("utf-8"))


NOWHERE = ScriptPlace("", ())


class LineFinder:
    """Caches files and stacks, so that finding a line takes a few microseconds."""

    def __init__(self) -> None:
        self.last = ""
        # Returns the script's line behind a line of code that torch.compile generated; None for any other file.
        self.source_of: Callable[[str, int], tuple[str, str] | None] | None = None
        paths = sysconfig.get_paths()
        self._packages = _roots(paths["purelib"], paths["platlib"], *site.getsitepackages())
        torch = sys.modules.get("torch")
        torch_folder = [os.path.dirname(torch.__file__)] if torch is not None and torch.__file__ else []
        self._foreign = (*self._packages, *_roots(paths["stdlib"], paths["platstdlib"], _OURS, *torch_folder))
        # A file's name ("" if its lines are left out), whether it is the script's, and its functions that determine a
        # phase. Keyed by file instead of code object, because some code objects of torch.compile are not hashable.
        self._files: dict[str, tuple[str, bool, dict[str, str] | None]] = {}
        self._ranks = {phase: rank for rank, phase in enumerate(_phases())}
        self._places: dict[tuple[str | int, ...], tuple[ScriptPlace, list[CodeType]]] = {}

    def find(self, frame: FrameType | None) -> ScriptPlace:
        """Return the place of this stack of frames."""
        # An instruction's number is there to read, where its line would be decoded from a table each time. Stacks are told
        # apart by their code objects' ids, which are not used again: `_places` keeps the code objects.
        files, innermost = self._files, frame
        seen: list[int] = []
        phase = ""
        while frame is not None and (file := (code := frame.f_code).co_filename) != _RUNNER:
            name = files.get(file)
            if name is None:
                name = files[file] = self._name(file)
            if name[0]:
                seen += (id(code), frame.f_lasti)
            if name[2] is not None and (told := name[2].get(code.co_name)):
                phase = min(phase or told, told, key=self._ranks.__getitem__)
            frame = frame.f_back
        key: tuple[str | int, ...] = (*seen, phase)
        found = self._places.get(key)
        if found is None:
            found = self._places[key] = self._place(innermost, phase)
        place = found[0]
        self.last = place.line or self.last
        return place

    def _place(self, frame: FrameType | None, phase: str) -> tuple[ScriptPlace, list[CodeType]]:
        """Build a place; for generated code, the script's line behind it counts, if there is one."""
        line, stack, codes = "", [], []
        while frame is not None and (file := frame.f_code.co_filename) != _RUNNER:
            name, is_own, _ = self._files[file]
            if name:
                codes.append(frame.f_code)
                made_from = self.source_of(file, frame.f_lineno) if self.source_of and is_own else None
                if at := f"{name}:{frame.f_lineno}" if made_from is None else made_from[0]:
                    stack.append(at)
                    line = line or (at if is_own else "")
            frame = frame.f_back
        return ScriptPlace(line, tuple(stack), phase), codes

    def is_own(self, path: str) -> bool:
        """Whether a file is the script's."""
        return not (path.startswith("<") or os.path.realpath(path).startswith(self._foreign))

    def _name(self, path: str) -> tuple[str, bool, dict[str, str] | None]:
        if self.is_own(path):
            return os.path.basename(path), True, None
        real = os.path.realpath(path)
        root = max((root for root in self._packages if real.startswith(root)), key=len, default="")
        name = real.removeprefix(root).replace(os.sep, "/") if root and not real.startswith(_OURS) else ""
        is_left_out = name.startswith(tuple(f"{package}/" for package in _OF_TORCH))
        return "" if is_left_out else name, False, telling_functions().get(name)


def _roots(*paths: str) -> tuple[str, ...]:
    return tuple({os.path.realpath(path) + os.sep for path in paths})
