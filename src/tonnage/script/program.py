"""The main program to run: a script, a module (`-m package.module`) or a notebook.

Files are located without importing anything: a module's package may import torch, which must come after the stand-ins
for CUDA.
"""

import importlib.util
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal

from tonnage.errors import ScriptNotFound

Kind = Literal["script", "module", "notebook"]
WHAT_RUNS = (
    "Name a Python file, a notebook (.ipynb), -m MODULE, or a command of python, torchrun, accelerate or deepspeed."
)


@dataclass(frozen=True)
class Program:
    """A program, by its given name and working directory."""

    name: str
    kind: Kind = "script"
    command: tuple[str, ...] = ()  # what to write after `tonnage run` to run it again, without its own arguments
    folder: str = field(default_factory=os.getcwd)

    @classmethod
    def of_file(cls, path: str | Path, command: tuple[str, ...] = ()) -> "Program":
        """Make a program from a file: a notebook by its suffix, or else a script."""
        kind: Kind = "notebook" if Path(path).suffix == ".ipynb" else "script"
        return cls(str(path), kind, command or (os.path.abspath(path),))

    @property
    def file(self) -> Path | None:
        """The path of its text, independent of the current directory; None if it cannot be found."""
        if self.kind != "module":
            return Path(self.folder, self.name)
        # The file that `python -m name` would run.
        first, *rest = self.name.split(".")
        spec = PathFinder.find_spec(first, [self.folder])
        if spec is None:
            with suppress(ImportError, ValueError):
                spec = importlib.util.find_spec(first)  # for a name without a dot nothing is imported
        for part in rest:
            places = spec.submodule_search_locations if spec else None
            spec = PathFinder.find_spec(part, list(places)) if places else None
        if spec and spec.submodule_search_locations:
            spec = PathFinder.find_spec("__main__", list(spec.submodule_search_locations))
        return Path(spec.origin) if spec and spec.origin else None

    @property
    def header(self) -> dict[str, Any]:
        """The fields of a recording's header that describe it."""
        return {"script": str(self.file or ""), "command": self.command, "folder": self.folder}

    def check(self) -> "Program":
        """Return the program if it exists and can be run; raise ScriptNotFound otherwise."""
        file = self.file
        if self.kind == "module":
            if file is None:
                raise ScriptNotFound(
                    f"There is no module {self.name} to run: looked in {self.folder} and in what is installed.",
                    hint="Name it as `python -m` takes it; a package needs a __main__.py.",
                )
            return self
        assert file is not None
        if not file.is_file():
            found = "a folder" if file.is_dir() else "nothing"
            raise ScriptNotFound(f"There is no script at {self.name}: found {found}.", hint=WHAT_RUNS)
        if file.suffix in (".sh", ".bash", ".slurm", ".sbatch"):
            raise ScriptNotFound(f"{self.name} is a script of the shell, not of Python.", hint=WHAT_RUNS)
        if self.kind == "notebook":
            from tonnage.script.notebook import read_cells

            read_cells(file)  # refuse a damaged one before a card is created
        return self

    @contextmanager
    def as_main(self, arguments: list[str]) -> Iterator[None]:
        """Set `sys.argv`, `sys.path` and, for a notebook, the working directory while it runs."""
        saved, folder = (sys.argv, list(sys.path)), os.getcwd()
        sys.argv = [self.name, *arguments]
        sys.path.insert(0, self.folder if self.kind == "module" else str(Path(self.folder, self.name).resolve().parent))
        if self.kind == "notebook":
            os.chdir(Path(self.folder, self.name).parent)
        try:
            yield
        finally:
            sys.argv, sys.path[:] = saved
            os.chdir(folder)

    def run(self) -> None:
        """Run the program to its end."""
        if self.kind == "module":
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        elif self.kind == "notebook":
            from tonnage.script.notebook import run_notebook

            run_notebook(Path(self.folder, self.name))
        else:
            runpy.run_path(self.name, run_name="__main__")
