"""Passes on what a rank prints to files, as it comes. What was passed on once is not passed on again by a second run."""

import sys
from pathlib import Path


class Echo:
    """One rank's standard output and standard error."""

    def __init__(self, output: Path, errors: Path) -> None:
        self._passed_on = {output: 0, errors: 0}
        self._streams = {output: "stdout", errors: "stderr"}

    def read(self) -> None:
        """Whatever is new."""
        for path, start in self._passed_on.items():
            if not path.exists() or path.stat().st_size <= start:
                continue
            with path.open("rb") as file:
                file.seek(start)
                new = file.read()
            self._passed_on[path] = start + len(new)
            stream = getattr(sys, self._streams[path])
            stream.write(new.decode(errors="replace"))
            stream.flush()
