"""The folder that an assistant's requests are limited to, and the one for this session's pages and recordings.

It does not restrict a script that is run: that is what the confirmation before a run is for.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from tempfile import mkdtemp

from tonnage.errors import RequestError
from tonnage.untrusted import open_file, printable

_SEPARATORS = re.compile(r"""[=,\s'"\\]+""")


@dataclass
class Folder:
    """Files may be read below `root`, and in `session` by their bare names."""

    root: Path
    session: Path = field(default_factory=lambda: Path(mkdtemp(prefix="tonnage-mcp-")))
    _numbers: "count[int]" = field(default_factory=lambda: count(1))

    def __post_init__(self) -> None:
        self.root, self.session = self.root.resolve(), self.session.resolve()

    def new(self, stem: str, suffix: str) -> Path:
        """Return an unused path in the session's folder: run-1.tonnage, plan-2.json."""
        return self.session / f"{stem}-{next(self._numbers)}{suffix}"

    def pasted(self, text: str) -> Path:
        """Write pasted text to a file of the session."""
        path = self.new("pasted", ".txt")
        path.write_text(text, encoding="utf-8", errors="replace")
        return path

    def file(self, name: str) -> Path:
        """Return the file of that name in the session or below the root; raises RequestError for others."""
        if not name.strip():
            raise RequestError("No file was named.", hint=f"Name one below {self.root}.")
        path = self._resolved(name)
        if path is not None and "/" not in name and (self.session / name).is_file():
            return self.session / name
        if path is None or not (path.is_relative_to(self.root) or path.is_relative_to(self.session)):
            raise self._refusal(name)
        return path

    def check(self, words: Iterable[str]) -> None:
        """Reject arguments whose path leads out of the folder; the command itself checks everything else."""
        for piece in (piece for word in words for piece in _SEPARATORS.split(word)):
            path = self._resolved(piece)
            if path is None or not path.is_relative_to(self.root):
                raise self._refusal(piece)

    def _resolved(self, name: str) -> Path | None:
        """Return the resolved path, following links; None if it cannot be a path."""
        try:
            path = (self.root / Path(name).expanduser()).resolve()
            path.exists()
            return path
        except (ValueError, OSError, RuntimeError):  # a null, a name too long, a loop of links, an unknown user
            return None

    def _refusal(self, name: str) -> RequestError:
        problem = f"{printable(name)[:200]!r} is not below {self.root}, which is all that this server may read."
        return RequestError(problem, hint="Name a file there, or start the server with --folder.")


def is_text(path: Path) -> bool:
    """Say whether a file is text, like a log: recordings and snapshots have null bytes near their beginning."""
    try:
        with open_file(path) as file:
            return b"\0" not in file.read(4096)
    except OSError:
        return False  # the command reports what is wrong with it
