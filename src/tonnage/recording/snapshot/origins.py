"""Interprets a stack: the script's own line, the operator, and what the program was doing.

Stacks are all that a snapshot says about why memory was requested. They are matched by the names of PyTorch's
functions; sizes, order and lifetimes are not used, and no file is opened.
"""

import re
from dataclasses import dataclass
from typing import Literal

from tonnage.recording.snapshot.schema import Frame

# "engine": no Python frame at all, as on backward's threads. "script": no frame of PyTorch says more.
About = Literal["forward", "backward", "optimizer", "model", "cache", "engine", "script"]

_TORCH = re.compile(r"(^|/)torch/(nn|optim|autograd|utils|cuda|amp|distributed|functional\.py|_\w)")
# Our own frames appear between a script and PyTorch where hooks run or the script was started.
_LIBRARY = re.compile(
    r"/(site|dist)-packages/|^(site|dist)-packages/|/lib/python\d|^<(?!ipython|stdin)"
    r"|/torchinductor_|(^|/)tonnage/(script|commands|recording|virtual|integrations)/"
)
_OPERATOR = re.compile(r"at::_ops::(\w+)::(?:call|redispatch)")
_MAKES_EMPTY = ("empty", "resize_", "new_empty")
_OPTIMIZER_FILE = re.compile(r"(^|/)(optim|optimizers?)/|optim[^/]*\.py$", re.IGNORECASE)
_NOT_OPTIMIZER = ("lr_scheduler.py", "swa_utils.py")
_BACKWARD_NAMES = ("backward", "_engine_run_backward", "_make_grads")
_BACKWARD_FILES = ("torch/_tensor.py", "torch/autograd/__init__.py", "torch/autograd/graph.py")
_BACKWARD_ROOTS = (("utils/checkpoint.py", "unpack_hook"), ("autograd/function.py", "apply"))
_MODEL_NAMES = (
    "_apply",
    "register_parameter",
    "register_buffer",
    "load_state_dict",
    "_load_from_state_dict",
    "__init__",
)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request came from."""

    about: About
    line: str = ""
    operator: str = ""
    stack: tuple[str, ...] = ()
    makes_state: bool = False
    outside: tuple[str, ...] = ()  # of `stack`, the lines outside all module calls: the script's own loops
    script: str = ""  # the file whose top-level code runs


def origin_of(frames: tuple[Frame, ...]) -> Origin:
    """Interpret these frames (innermost first)."""
    python = [
        Frame(f.name, f.filename.replace("\\", "/"), f.line)
        for f in frames
        if f.filename.endswith(".py") or f.filename.startswith("<")
    ]
    is_own = _is_own if any(_is_own(frame) for frame in python) else _is_installed
    lines = tuple(_line(frame) for frame in python if is_own(frame))
    calls = [place for place, frame in enumerate(python) if _calls_module(frame)]
    # The innermost operator that computes; one that only allocates if there is no other.
    names = [match[1] for f in frames if (match := _OPERATOR.match(f.name))]
    native = next((name for name in names if not name.startswith(_MAKES_EMPTY)), names[0] if names else "")
    scripts = (_line(frame).rpartition(":")[0] for frame in python if frame.name == "<module>" and is_own(frame))
    return Origin(
        about=_about(python, frames),
        line=lines[0] if lines else "",
        operator=native or _python_operator(python),
        stack=lines,
        makes_state=any(f.name == "_init_group" for f in python),
        outside=tuple(_line(frame) for frame in python[calls[-1] if calls else 0 :] if is_own(frame)),
        script=next(scripts, ""),
    )


def _is_own(frame: Frame) -> bool:
    return not _LIBRARY.search(frame.filename) and not _TORCH.search(frame.filename)


def _is_installed(frame: Frame) -> bool:
    """Whether the frame is in a package other than PyTorch."""
    return not _TORCH.search(frame.filename) and not frame.filename.startswith("<")


def _line(frame: Frame) -> str:
    return f"{frame.filename.rpartition('/')[2]}:{frame.line}"


def _about(python: list[Frame], frames: tuple[Frame, ...]) -> About:
    for f in python:
        steps = f.name == "step" and _OPTIMIZER_FILE.search(f.filename)
        wraps = f.name == "wrapper" and f.filename.endswith("torch/optim/optimizer.py")
        if (steps or wraps) and not f.filename.endswith(_NOT_OPTIMIZER):
            return "optimizer"
    if any("torch::autograd::Engine" in f.name for f in frames) or any(
        f.name in _BACKWARD_NAMES and f.filename.endswith(_BACKWARD_FILES) for f in python
    ):
        return "backward"
    if not python:
        return "engine"
    if any(python[-1].filename.endswith(file) and python[-1].name == name for file, name in _BACKWARD_ROOTS):
        return "backward"
    if any(f.filename.endswith("transformers/cache_utils.py") for f in python):
        return "cache"
    if any(f.name == "from_pretrained" or ("torch/nn/" in f.filename and f.name in _MODEL_NAMES) for f in python):
        return "model"
    return "forward" if any(_calls_module(f) for f in python) else "script"


def _calls_module(frame: Frame) -> bool:
    return frame.name in ("_call_impl", "_wrapped_call_impl") and frame.filename.endswith("torch/nn/modules/module.py")


def _python_operator(python: list[Frame]) -> str:
    """Return the function of PyTorch that the script's line called, for stacks without native frames."""
    for frame in python:
        if not _TORCH.search(frame.filename):
            return ""
        if frame.filename.endswith("torch/nn/modules/module.py") and frame.name in ("to", "cuda", "half", "bfloat16"):
            return frame.name
        if frame.name.startswith(("<", "_wrapped", "_call", "_apply")) or frame.name == "convert":
            continue
        # Files of torch.nn are named after their modules: linear.py, normalization.py.
        return frame.filename.rpartition("/")[2].removesuffix(".py") if frame.name == "forward" else frame.name
    return ""
