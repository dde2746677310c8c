"""Finds the script's own line in a stack of frames: not the library's, not Python's, not ours."""

import os
import site
import sys
import sysconfig
from collections.abc import Callable
from types import CodeType, FrameType

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def _foreign_roots() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    roots = {paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"], _OURS, *site.getsitepackages()}
    torch = sys.modules.get("torch")
    if torch is not None and torch.__file__:
        roots.add(os.path.dirname(torch.__file__))
    return tuple(os.path.realpath(root) + os.sep for root in roots)


class LineFinder:
    """Remembers for each code object whether it is the script's, so that finding a line costs a few microseconds."""

    def __init__(self) -> None:
        self.last = ""
        # For code that torch.compile generated: the script's line behind a line of it; None for any other file.
        self.source_of: Callable[[str, int], tuple[str, str] | None] | None = None
        self._foreign = _foreign_roots()
        self._names: dict[CodeType, str] = {}

    def find(self, frame: FrameType | None) -> str:
        """The innermost line of the script in this stack, or nothing."""
        names = self._names
        while frame is not None:
            code = frame.f_code
            name = names.get(code)
            if name is None:
                name = names[code] = self._own_name(code)
            if name and (line := self._line_at(code, name, frame.f_lineno)):
                self.last = line
                return line
            frame = frame.f_back
        return ""

    def _line_at(self, code: CodeType, name: str, number: int) -> str:
        """Of code that a compiler generated, the script's own line behind it, or nothing."""
        found = self.source_of(code.co_filename, number) if self.source_of else None
        return f"{name}:{number}" if found is None else found[0]

    def stack(self, frame: FrameType | None) -> tuple[str, ...]:
        """All lines of the script in this stack, innermost first."""
        found = []
        while frame is not None:
            if name := self._names.get(frame.f_code) or self._own_name(frame.f_code):
                line = self._line_at(frame.f_code, name, frame.f_lineno)
                found += [line] if line else []
            frame = frame.f_back
        return tuple(found)

    def is_own(self, path: str) -> bool:
        """Whether a file is the script's."""
        return not (path.startswith("<") or os.path.realpath(path).startswith(self._foreign))

    def _own_name(self, code: CodeType) -> str:
        return os.path.basename(code.co_filename) if self.is_own(code.co_filename) else ""
