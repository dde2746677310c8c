"""What can go wrong, as words for people.

    TonnageError            anything we can explain; exit 2
    ├── RequestError        the request was wrong; exit 2
    │   ├── BadSize         "80 GBB" is no size
    │   ├── UnknownGpu      no such card in the catalogue
    │   ├── BadGpu          a file that describes no card
    │   ├── UnknownModel    no preset, file or folder of that name
    │   ├── BadModel        a configuration or checkpoint that cannot be read, or that makes no sense
    │   ├── BadLayout       a parallel layout, batch or flag that cannot be
    │   ├── ScriptNotFound  no such script
    │   ├── OutputExists    would overwrite a file
    │   ├── BadRecording    not a recording, a damaged one, or a newer one
    │   ├── BadSnapshot     not a memory snapshot of PyTorch, a damaged one, or one that is more than data
    │   ├── BadTrace        not a trace of allocator events
    │   └── BadProfile      not a profile or file of ceilings that a roofline can be drawn from
    ├── NotModelled         the script needs what the virtual GPU does not have
    └── MissingPart         a part that this needs is not installed (torch, a compiler); exit 2

An error says what was asked, what was found, and in `hint` the one thing to do, which is also a note under Python's own
traceback. `commands.main` alone prints them. This module does not know how they are shown.
"""

from typing import Any

from tonnage.untrusted import clipped

_MOST_WORDS = 1800  # characters


class TonnageError(Exception):
    """The base: a sentence, a hint, and the exit status that it means."""

    exit_code = 2

    def __init__(self, problem: str, *, hint: str = "") -> None:
        # It may quote a file's words or name, whoever wrote them.
        super().__init__(clipped(problem, _MOST_WORDS))
        self.hint = hint
        if hint:
            self.add_note(hint)

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel between processes without `__init__`, which takes other arguments in many a class than the sentence."""
        return _blank, (type(self),), {"args": self.args, **self.__dict__}

    @property
    def words(self) -> str:
        """The sentence and, on a line of its own, what to do."""
        return f"{self}\n{self.hint}" if self.hint else str(self)


def _blank(cls: type[TonnageError]) -> BaseException:
    """Make an error that is not initialised; Python's rules allow only the built-in class whose layout it has to make it."""
    base: Any = cls
    while base.__module__ != "builtins":
        base = base.__base__
    blank: BaseException = base.__new__(cls)
    return blank


class RequestError(TonnageError):
    """The request was wrong."""


class BadSize(RequestError, ValueError):
    """A text that is no size in bytes."""


class UnknownGpu(RequestError, LookupError):
    """A name that the catalogue does not hold."""


class BadGpu(RequestError, ValueError):
    """A file that describes no card, or one that makes no sense."""


class UnknownModel(RequestError, LookupError):
    """A name that is no preset, file or folder."""


class BadModel(RequestError, ValueError):
    """A configuration or checkpoint that cannot be read, or that makes no sense."""


class BadLayout(RequestError, ValueError):
    """A parallel layout, batch or flag that cannot be, for this model on these GPUs."""


class ScriptNotFound(RequestError):
    """A script that is not there."""


class OutputExists(RequestError):
    """A file that would be overwritten."""


class BadRecording(RequestError):
    """A file that is no recording, or that this version cannot read."""


class BadSnapshot(RequestError, ValueError):
    """A file that is no memory snapshot of PyTorch, that is damaged, or that holds more than data."""


class BadTrace(RequestError):
    """A file that is no list of allocator events."""


class BadProfile(RequestError):
    """A file that is no profile of kernels or no file of ceilings, or that says too little."""


class NotModelled(TonnageError):
    """The script needs what the virtual GPU does not have."""


class MissingPart(TonnageError):
    """Something this needs is not installed."""


def missing_part(what: str, error: ImportError) -> MissingPart:
    """The error for something that could not be imported: what needs it, and what to install."""
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
