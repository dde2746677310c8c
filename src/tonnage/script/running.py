"""The main program: a script, a module (`-m package.module`) or a notebook, run as Python would, with its own output,
traceback and exit status.

Files are located without importing anything: a module's package may import torch, which must come after the stand-ins
for CUDA.
"""

import importlib.util
import os
import re
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal
from zipfile import is_zipfile

from tonnage.errors import NotModelled, ScriptNotFound, TonnageError
from tonnage.script.exit_handlers import exit_handlers_at_end

if TYPE_CHECKING:
    from tonnage.recording.records import Outcome

Kind = Literal["script", "module", "notebook"]
WHAT_RUNS = (
    "Name a Python file, a notebook (.ipynb), -m MODULE, or a command of python, torchrun, accelerate or deepspeed."
)
_NO_TRITON = (
    "A CPU build of torch comes without Triton. Install it (pip install triton): it imports without a GPU, and on a "
    "virtual one its kernels are counted and not run."
)
RUNNER = os.path.abspath(__file__)  # frames of this file and below started us, and are not the script's
OWN_FOLDER = os.path.dirname(os.path.dirname(RUNNER)) + os.sep
_INTERRUPTED = "interrupted inside the virtual GPU"  # a KeyboardInterrupt that went through C++ (native/bridge.h)
_DEVICE = OWN_FOLDER + "virtual" + os.sep
_BEGINNING_BYTES = 4096
_SHELL = re.compile(rb"#!\s*\S*[/ ](ba|da|k|z|fi|c|tc)?sh\b")  # the first line of a script without a suffix
_SOON_S, _LONGEST_S = 0.005, 2.0


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
            first = self.name.partition(" ")[0]
            is_quoted = first != self.name and Path(self.folder, first).is_file()
            hint = f"Leave out the quotes around {self.name}: its arguments follow it." if is_quoted else WHAT_RUNS
            raise ScriptNotFound(f"There is no script at {self.name}: found {found}.", hint=hint)
        if not os.access(file, os.R_OK):
            raise ScriptNotFound(f"{self.name} may not be read by you.", hint=f"Allow it: chmod u+r {self.name}")
        with file.open("rb") as opened:
            beginning = opened.read(_BEGINNING_BYTES)
        is_shell = file.suffix != ".py" and _SHELL.match(beginning) is not None
        if is_shell or file.suffix in (".sh", ".bash", ".slurm", ".sbatch"):
            raise ScriptNotFound(f"{self.name} is a script of the shell, not of Python.", hint=WHAT_RUNS)
        if b"\0" in beginning and not beginning.startswith(MAGIC_NUMBER) and not is_zipfile(file):
            raise ScriptNotFound(f"{self.name} is a binary file, not a script of Python.", hint=WHAT_RUNS)
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
        if self.kind == "module":
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        elif self.kind == "notebook":
            from tonnage.script.notebook import run_notebook

            run_notebook(Path(self.folder, self.name))
        else:
            runpy.run_path(self.name, run_name="__main__")


@dataclass(frozen=True)
class Ending:
    """How a script ended."""

    outcome: "Outcome"
    exit_status: int = 0
    error: str = ""


def run_as_main(
    program: Program | Path,
    arguments: list[str],
    torch: Any,
    around: AbstractContextManager[Any] | None = None,
    told_elsewhere: tuple[type[BaseException], ...] = (),
    explain: Callable[[BaseException], str] = lambda error: "",
) -> Ending:
    """Run a program to its end, however it ends, inside `around`. Errors in `told_elsewhere` are not printed.

    `explain` says on what value that a virtual GPU does not have an error depends, if on any.
    """
    # Imported here, since what reads a command line needs this module too.
    from tonnage.recording.records import DEPENDS_STATUS

    program = program if isinstance(program, Program) else Program.of_file(program)
    try:
        with (
            program.as_main(arguments),
            around or nullcontext(),
            _interrupts_outside_the_device(),
            exit_handlers_at_end(),
        ):
            program.run()
        return Ending("ok")
    except torch.OutOfMemoryError as error:
        _show(error)
        return Ending("oom", 1, str(error))
    except SystemExit as error:
        if error.code is None or error.code == 0:
            return Ending("ok")
        if dependence := explain(error):
            return Ending("depends", DEPENDS_STATUS, dependence)
        if isinstance(error.code, int):
            return Ending("error", error.code, f"exit status {error.code}")
        print(error.code, file=sys.stderr)
        return Ending("error", 1, str(error.code))
    except KeyboardInterrupt:
        return Ending("error", 130, "interrupted")
    except BaseException as error:
        if _INTERRUPTED in str(error):
            return Ending("error", 130, "interrupted")
        if not isinstance(error, told_elsewhere):
            _show(error)
        # An out-of-memory error that caused this one: a pipeline's schedule, for example, wraps its stages' errors.
        shortage = error.__cause__
        while shortage is not None and not isinstance(shortage, torch.OutOfMemoryError):
            shortage = shortage.__cause__
        if shortage:
            return Ending("oom", 1, str(shortage))
        if dependence := explain(error):
            return Ending("depends", DEPENDS_STATUS, dependence)
        hint = getattr(error, "hint", "") if isinstance(error, TonnageError) else ""
        return Ending("error", 1, " ".join(filter(None, [f"{type(error).__name__}: {error}", hint])))
    finally:
        sys.stdout.flush()


@contextmanager
def _interrupts_outside_the_device() -> Iterator[None]:
    """Delay KeyboardInterrupt, for seconds at most, while the virtual GPU works: it would leave an event half recorded."""
    plain, since = signal.getsignal(signal.SIGINT), 0.0
    if plain is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt_soon(number: int) -> None:
        # The signal goes to the main thread itself: one that the timer's thread gets does not wake it from a wait.
        main = threading.main_thread().ident or 0
        threading.Timer(_SOON_S, signal.pthread_kill, (main, number)).start()

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal since
        since = since or time.monotonic()
        while frame is not None and frame.f_code.co_filename != RUNNER:
            if frame.f_code.co_filename.startswith(_DEVICE) and time.monotonic() < since + _LONGEST_S:
                interrupt_soon(number)
                return
            frame = frame.f_back
        since = 0.0
        signal.default_int_handler(number, frame)

    def tell(problem: "sys.UnraisableHookArgs") -> None:
        """Raise an interrupt again that hit a finalizer, where Python would drop it."""
        if issubclass(problem.exc_type, KeyboardInterrupt):
            interrupt_soon(signal.SIGINT)
        else:
            told_by(problem)

    told_by = sys.unraisablehook
    signal.signal(signal.SIGINT, handle)
    sys.unraisablehook = tell
    try:
        yield
    finally:
        sys.unraisablehook = told_by
        signal.signal(signal.SIGINT, plain)


def _show(error: BaseException) -> None:
    """Print the traceback as Python would, without our own frames and those that ran the script.

    An error of Tonnage's own that nothing else caused says all in words; of the traceback, the script's line is shown.
    """
    if isinstance(error, TonnageError) and not isinstance(error, NotModelled) and error.__cause__ is None:
        print(f"tonnage: {error.words}", file=sys.stderr)
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_ours(frame.filename)]
        if own:
            print(f"  at {os.path.basename(own[-1].filename)}:{own[-1].lineno}  {own[-1].line}", file=sys.stderr)
        return
    shown = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = shown
    while part is not None:
        part.stack = traceback.StackSummary.from_list([frame for frame in part.stack if not is_ours(frame.filename)])
        part = part.__cause__ or part.__context__
    sys.stderr.write("".join(shown.format()))
    if isinstance(error, ModuleNotFoundError) and error.name == "triton":
        print(_NO_TRITON, file=sys.stderr)


def is_ours(path: str) -> bool:
    """Whether frames of this file are ours or runpy's, not the script's."""
    return path.startswith(OWN_FOLDER) or path == "<frozen runpy>" or os.path.basename(path) == "runpy.py"
