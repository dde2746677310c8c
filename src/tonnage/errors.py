"""The errors that Tonnage reports, with readable messages.

    TonnageError            anything we can explain; exit 2
    ├── RequestError        the request was invalid; exit 2
    │   ├── BadSize         "80 GBB" is not a size
    │   ├── UnknownGpu      no such GPU in the catalogue
    │   ├── BadGpu          a file that does not describe a GPU
    │   ├── UnknownModel    no preset, file or folder of that name
    │   ├── BadModel        an unreadable or invalid configuration or checkpoint
    │   ├── BadLayout       an impossible parallel layout, batch or flag
    │   ├── ScriptNotFound  no such script
    │   ├── OutputExists    would overwrite a file
    │   ├── BadAssumption   a value to assume that cannot be read (script.assume)
    │   ├── BadRecording    not a recording, a damaged one, or a newer one
    │   ├── BadSnapshot     not a PyTorch memory snapshot, a damaged one, or one with more than data
    │   ├── BadTrace        not a trace of allocator events
    │   └── BadProfile      not a profile or ceilings file for a roofline
    ├── NotModelled         the script needs something that the virtual GPU does not model
    └── MissingPart         a required dependency is not installed (torch, a compiler); exit 2

An error says what was asked, what was found, and in `hint` what to do, which is also a note under Python's own traceback. Only
`commands.main` prints errors.
"""

from typing import Any

from tonnage.untrusted import clipped

_MOST_WORDS = 1800  # characters


class TonnageError(Exception):
    """The base class: a sentence, a hint, and the exit status."""

    exit_code = 2

    def __init__(self, problem: str, *, hint: str = "") -> None:
        # It may quote untrusted text or file names.
        super().__init__(clipped(problem, _MOST_WORDS))
        self.hint = hint
        if hint:
            self.add_note(hint)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without `__init__`, which in many subclasses takes other arguments than the sentence."""
        return _blank, (type(self),), {"args": self.args, **self.__dict__}

    @property
    def words(self) -> str:
        """The sentence and, on a line of its own, what to do."""
        return f"{self}\n{self.hint}" if self.hint else str(self)


def _blank(cls: type[TonnageError]) -> BaseException:
    """Create an uninitialized error; only the built-in base class with its layout can create it."""
    base: Any = cls
    while base.__module__ != "builtins":
        base = base.__base__
    blank: BaseException = base.__new__(cls)
    return blank


class RequestError(TonnageError):
    """The request was invalid."""


class BadSize(RequestError, ValueError):
    """A text that is not a size in bytes."""


class UnknownGpu(RequestError, LookupError):
    """A name that is not in the catalogue."""


class BadGpu(RequestError, ValueError):
    """A file that does not describe a valid GPU."""


class UnknownModel(RequestError, LookupError):
    """A name that is not a preset, file or folder."""


class BadModel(RequestError, ValueError):
    """A configuration or checkpoint that is unreadable or invalid."""


class BadLayout(RequestError, ValueError):
    """A parallel layout, batch or flag that is impossible for this model on these GPUs."""


class ScriptNotFound(RequestError):
    """A script that does not exist."""


class OutputExists(RequestError):
    """A file that would be overwritten."""


class BadRecording(RequestError):
    """A file that is not a recording, or that this version cannot read."""


class BadSnapshot(RequestError, ValueError):
    """A file that is not a PyTorch memory snapshot, is damaged, or holds more than data."""


class BadTrace(RequestError):
    """A file that is not a list of allocator events."""


class BadProfile(RequestError):
    """A file that is not a valid kernel profile or ceilings file."""


class NotModelled(TonnageError):
    """The script needs something that the virtual GPU does not model."""


class MissingPart(TonnageError):
    """A required dependency is not installed."""


def missing_part(what: str, error: ImportError) -> MissingPart:
    """Return the error for a failed import: what needs it, and what to install."""
    package = (error.name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or not package:
        root: BaseException = error
        while root.__cause__:
            root = root.__cause__
        problem = f"{what} cannot be used: a library that it needs does not import ({error}: {root})."
        return MissingPart(problem, hint="Install builds of it and of torch that belong together.")
    ours = {"torch": "'tonnage[fit]'", "scipy": "'tonnage[fit]'", "numpy": "'tonnage[fit]'"}
    problem = f"{what} needs {package}, which is not installed in this environment."
    return MissingPart(problem, hint=f"Install it: pip install {ours.get(package, package)}")
