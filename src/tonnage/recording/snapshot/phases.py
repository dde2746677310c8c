"""Infers the phase and step of each event from stacks and profiler annotations, and what each block was for.

Stacks are all that a snapshot says about why memory was requested. They are matched by the names of PyTorch's
functions; no file is opened.

A phase begins with the first event that shows it. Backward runs on threads without Python frames, so an event without
any is backward's, if other events have some. A step begins with the first forward after an optimizer step; in a trace
without an optimizer, with the first forward after a backward; with neither, with an iteration of the script's own
loop outside all modules.

A snapshot has no tensor names. Parameters are what functions that create or move a model allocate; gradients are what
outlives their backward pass and has a parameter's size; optimizer states are what outlives an optimizer step.
Anything else stays `other`. Blocks from before the first event have at most a stack: if as many of them as there are
gradients have the gradients' sizes, they are the parameters.
"""

import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tonnage.ledger import Category
from tonnage.recording.loops import loop_starts
from tonnage.recording.records import Allocation, Mark
from tonnage.recording.snapshot.schema import Annotation, Frame

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
_MODEL_NAMES = "_apply register_parameter register_buffer load_state_dict _load_from_state_dict __init__".split()


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


_OPTIMIZER_MARK = "Optimizer.step"
_PASSING = ("backward", "optimizer")


class Guide(ABC):
    """Supplies the phase and step of each event in turn."""

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self.step = 0
        self.stack: tuple[str, ...] = ()  # the stack that called backward
        self.marks: list[Mark] = []

    @property
    def line(self) -> str:
        """The script's line that called backward, while it runs."""
        return self.stack[0] if self.stack else ""

    @abstractmethod
    def reach(self, origin: Origin, time_us: int, sequence: int) -> None:
        """Advance to the next event, which has this origin."""


class Phases(Guide):
    """Follows the events; `phase` and `step` are the current ones."""

    def __init__(self, origins: Sequence[Origin], annotations: Sequence[Annotation]) -> None:
        super().__init__("setup" if any(origin.line for origin in origins) else "")
        self._knows_stacks = bool(self.phase)
        self._ahead = [a for a in annotations if a.name.startswith(_OPTIMIZER_MARK)][::-1]
        self._shows_optimizer = bool(self._ahead) or any(origin.about == "optimizer" for origin in origins)
        self._step_is_over = True

    def reach(self, origin: Origin, time_us: int, sequence: int) -> None:
        """Advance to the next event, which has this origin."""
        while self._ahead and self._ahead[-1].time_us <= time_us:
            annotation = self._ahead.pop()
            if annotation.is_start:
                self._step_is_over = True
            if self._knows_stacks:
                self._enter("optimizer" if annotation.is_start else "other", sequence)
        about = origin.about
        if about == "optimizer":
            self._enter("optimizer", sequence)
            self._step_is_over = True
        elif about == "backward" or (about == "engine" and self._knows_stacks):
            self._enter("backward", sequence)
            self._step_is_over |= not self._shows_optimizer
            self.stack = origin.stack or self.stack
        elif about in ("forward", "cache"):
            if self._step_is_over:
                self._step_is_over = False
                self.step += 1
                self.marks.append(Mark(sequence, "step", str(self.step)))
            self._enter("forward", sequence)
        elif self.phase in _PASSING:
            self._enter("other", sequence)

    def _enter(self, phase: str, sequence: int) -> None:
        if phase != self.phase:
            self.phase = phase
            self.marks.append(Mark(sequence, "phase", phase))
            if phase != "backward":
                self.stack = ()


def mark_turns(allocations: Sequence[Allocation], origins: Sequence[Origin], marks: list[Mark]) -> None:
    """In a trace of forwards only, make each iteration of the script's loop a step. `origins` belong to the allocations."""
    steps = [mark for mark in marks if mark.kind == "step"]
    if len(steps) != 1 or any(mark.name in _PASSING for mark in marks):
        return
    stacks = [(a.born, origin.outside[::-1]) for a, origin in zip(allocations, origins, strict=True)]
    first = steps[0].sequence
    starts = [first, *(start for start in loop_starts(stacks, goes_deeper=True)[1:] if start > first)]
    marks.extend(Mark(start, "step", str(number)) for number, start in enumerate(starts[1:], start=2))
    for a in allocations:
        a.step = bisect_right(starts, a.born)


# cuBLAS's workspace for each thread and stream: on Hopper and Blackwell, and on older cards.
CUBLAS_BYTES = (33_554_432, 8_519_680)
_MOST_STATES = 2  # per parameter, as in Adam
# Blocks from before the trace, by their stack, if they have one.
_BY_STACK: dict[About, Category] = {
    "model": Category.PARAMETERS,
    "optimizer": Category.OPTIMIZER_STATES,
    "forward": Category.ACTIVATIONS,
    "cache": Category.KV_CACHE,
}


def categorise(
    allocations: Sequence[Allocation], origins: Sequence[Origin], marks: Sequence[Mark], started: int
) -> None:
    """Set each block's category. `origins` belong to the blocks; the first `started` blocks existed at the start."""
    model = [a for a, origin in zip(allocations, origins, strict=True) if origin.about == "model"]
    sizes = {a.requested_bytes for a in model} or {a.requested_bytes for a in allocations[:started]}
    phases = [mark for mark in marks if mark.kind == "phase"]
    starts, names = [mark.sequence for mark in phases], ["", *(mark.name for mark in phases)]
    multiplied: set[tuple[int, str]] = set()  # streams and phases in which cuBLAS has its workspace
    for a, origin in zip(allocations, origins, strict=True):
        stays = a.requested_bytes in CUBLAS_BYTES and a.died is None and a.phase in ("forward", "backward")
        if stays and (a.stream, a.phase) not in multiplied:
            multiplied.add((a.stream, a.phase))
            a.category = Category.WORKSPACE
        elif a.index < started:
            a.category = _BY_STACK.get(origin.about, Category.EARLIER)
        else:
            place = bisect_right(starts, a.born)
            outlives_phase = a.died is None or (place < len(starts) and a.died >= starts[place])
            a.category = _category(a, origin, outlives_phase, sizes)
    # Older blocks of the gradients' sizes: parameters, then states of an optimizer that allocates none. One that recomputes
    # its states frees the older ones during its step.
    older, made = allocations[:started], allocations[started:]
    by_step: dict[int, Counter[int]] = {}
    for a in made:
        if a.category is Category.GRADIENTS:
            by_step.setdefault(a.step, Counter())[a.requested_bytes] += 1
    counts = max(by_step.values(), key=Counter.total, default=Counter[int]())
    new_states = {a.requested_bytes for a in made if a.category is Category.OPTIMIZER_STATES}
    has_states = "optimizer" in names and not new_states
    by_size: dict[int, list[Allocation]] = {}
    for a in older:
        if a.category is not Category.EARLIER or a.requested_bytes not in counts:
            continue
        if a.died is None:
            by_size.setdefault(a.requested_bytes, []).append(a)
        elif a.requested_bytes in new_states and names[bisect_right(starts, a.died)] == "optimizer":
            a.category = Category.OPTIMIZER_STATES
    for size, alike in by_size.items():
        count = counts[size]
        whole = len(alike) // count * count
        for place, a in enumerate(alike[: min(whole, (1 + _MOST_STATES) * count if has_states else count)]):
            a.category = Category.PARAMETERS if place < count else Category.OPTIMIZER_STATES


def _category(a: Allocation, origin: Origin, outlives_phase: bool, sizes: set[int]) -> Category:
    if origin.about == "cache":
        return Category.KV_CACHE
    if a.phase == "optimizer":
        return Category.OPTIMIZER_STATES if origin.makes_state or outlives_phase else Category.WORKSPACE
    if a.phase == "backward":
        is_gradient = outlives_phase and (not sizes or a.requested_bytes in sizes)
        return Category.GRADIENTS if is_gradient else Category.ACTIVATIONS
    if a.phase == "forward":
        return Category.ACTIVATIONS
    return Category.PARAMETERS if origin.about == "model" else Category.OTHER
