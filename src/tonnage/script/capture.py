"""Captures what a typical step calls, by torch's own profiler: it is on for the first steps of a run and then never again.

| the script         | a step is                                                                                    |
|--------------------|----------------------------------------------------------------------------------------------|
| has an optimizer   | from the end of one optimizer's step to the end of the next, the first from its first forward |
| has none           | from one call of an outermost module to the next, the last one to the end of the run          |

The last of them is kept, without what makes an optimizer's states where it is the first: others find them. One that calls a great
many operators is enough, since each of them costs time. A step in which something is compiled or that is interrupted by
an evaluation is not typical, and another one takes its place. The profiler is begun once (again only after it was stopped for a
compilation), and where a step begins is a mark among its events: to begin it anew within a region that it has seen begin would
have torch write to memory that is gone. A script that profiles itself is left alone.
"""

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import TYPE_CHECKING, Any

from tonnage.clock.captured import CapturedStep
from tonnage.garbage import no_collection
from tonnage.script import profiler, streams
from tonnage.script.profiled import RECOMPUTE, Profile, read_step

if TYPE_CHECKING:
    from tonnage.script.attribution import Attribution

STEPS = 2
# Steps that are tried where some compile or evaluate.
_MOST_STEPS = 6
# Of blocks; with about four operators for each, and about a kilobyte for every operator.
_MOST_THOUSANDS = 256
_ENOUGH_THOUSANDS = 4
_TOO_LONG = "Its steps call too many operators to capture one, so nothing is known of its time."
_NOTE = "The script profiles itself, so its operators were not captured, and nothing is known of its time."


def _harmless(method: Any) -> Any:
    """Whatever goes wrong here, the script must not notice."""

    @wraps(method)
    def guarded(self: "StepCapture", *arguments: Any) -> None:
        try:
            method(self, *arguments)
        except Exception as problem:
            self.give_up(f"{type(problem).__name__}: {problem}")

    return guarded


class StepCapture:
    """Between `install` and `finish` the steps of a script are watched; `captured` is the one that was kept."""

    def __init__(self, who: "Attribution", tell: Callable[[str, str], None]) -> None:
        """Whom to ask for phases and steps, and whom to tell what was assumed."""
        self._who = who
        self._tell = tell
        self.captured: CapturedStep | None = None
        self._process = os.getpid()
        self._torch: Any = None
        self._profiling = self._over = self._asks_dynamo = False
        self._spoiled = False  # by a compilation; not to be kept
        self._paused = 0
        self._has_streams = False  # of the script's own
        self._steps: list[_Step] = []
        self._tried = 0
        self._thousands = 0

    def install(self) -> Callable[[], None]:
        """Watch from here on; the result undoes it."""
        import torch

        self._torch = torch
        self._who.observer = self
        undo = [self._make_way(), streams.on_making(torch, self._stream_made)]

        def restore() -> None:
            for each in undo:
                each()

        return restore

    def _stream_made(self) -> None:
        self._has_streams = True

    def give_up(self, why: str) -> None:
        """Capture nothing more."""
        self._over = True
        self._tell("profiler", f"The operators of a step could not be captured: {why[:160]}")
        if self._profiling:
            self._profiling = False
            with suppress(RuntimeError):
                profiler.end()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs here is no step of the script's: it is left out, and what began before it is dropped."""
        self._drop()
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @_harmless
    def _drop(self) -> None:
        if self._profiling and self._is_mine():
            self._spoiled = True
            self._stop()

    # Called by the attribution

    @_harmless
    def root_starts(self, module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """An outermost module is called."""
        if self._over or self._paused or not self._is_mine():
            return
        who = self._who
        if self._profiling and self._steps[-1].training != who.trains:
            self._stop()  # what ran before there was an optimizer is no step of a training
        if not self._profiling:
            self._start()
        elif not who.trains and self._steps[-1].called:
            self._next_step()
        if self._profiling:
            self._steps[-1].number = who.step
            evaluates = who.trains and who.phase in ("evaluation", "generation")
            self._steps[-1].call(module, arguments, keywords, evaluates=evaluates, again=who.stepping)

    @_harmless
    def root_ends(self, output: Any) -> None:
        """Its call is over; without an output where it failed."""
        if self._profiling and self._is_mine():
            self._steps[-1].failed |= output is None

    @_harmless
    def phase_begins(self, phase: str) -> None:
        """Another phase of the step."""
        if self._profiling and self._is_mine():
            profiler.mark(f"phase {phase}")

    @_harmless
    def module_starts(self) -> None:
        """Any module is called."""
        if self._profiling:
            self._steps[-1].module_calls += 1
            if threading.get_ident() != self._who.main_thread:
                profiler.mark(RECOMPUTE)  # autograd's engine calls modules only to recompute them
            if self._thousands > _MOST_THOUSANDS and self._is_mine():
                self._over = self._spoiled = True
                self._stop()
                self._tell("profiler", _TOO_LONG)

    def goes_on(self) -> None:
        """Another thousand blocks were made or dropped: what the profiler keeps takes memory, too."""
        self._thousands += self._profiling

    @_harmless
    def optimizer_starts(self, optimizer: Any) -> None:
        """An optimizer is about to step."""
        if self._profiling:
            groups = optimizer.param_groups
            self._steps[-1].parameters += sum(p.grad is not None for group in groups for p in group["params"])

    @_harmless
    def optimizer_ends(self) -> None:
        """It has: with it a step ends, if a forward went before. Others that follow belong to the next one."""
        if self._profiling and self._is_mine() and self._steps[-1].called:
            self._next_step()

    @_harmless
    def finish(self) -> None:
        """The run ends."""
        if self._profiling and self._is_mine():
            if not self._who.trains and self._steps[-1].called and not self._steps[-1].failed:
                self._next_step()
            self._stop()
        self._over = True

    # The profiler

    def _is_mine(self) -> bool:
        """The profiler is on in the main thread alone, and not in forked children."""
        return threading.get_ident() == self._who.main_thread and os.getpid() == self._process

    def _start(self) -> None:
        if profiler.is_on() or self._tried >= _MOST_STEPS:
            self._over = True
            return
        # A compilation runs every operator many times over, on tensors without memory.
        callbacks = sys.modules.get("torch._dynamo.callback")
        if callbacks is not None and not self._asks_dynamo:
            self._asks_dynamo = True
            callbacks.callback_handler.register_start_callback(self._compilation_starts)
        profiler.begin(follows_nodes=self._has_streams)
        self._profiling, self._spoiled = True, False
        self._steps = [_Step(self._who.trains)]
        profiler.mark("step")
        profiler.mark(f"phase {self._who.phase}")

    def _next_step(self) -> None:
        """A step is complete. Is that enough?"""
        done = self._steps[-1]
        done.complete, done.settings = True, profiler.settings()
        self._tried += 1
        self._steps.append(_Step(self._who.trains))
        profiler.mark("step")
        profiler.mark(f"phase {self._who.phase}")
        typical = sum(step.complete and not step.evaluates for step in self._steps)
        enough = STEPS if self._thousands < _ENOUGH_THOUSANDS else 1
        if typical >= enough or self._tried >= _MOST_STEPS:
            self._stop()
            self._over = True

    def _stop(self) -> None:
        if not self._profiling:
            return
        self._profiling = False
        with no_collection():
            results = profiler.end()
            # Keep the last complete step; one without an evaluation in it, if there is one.
            complete = [(at, step) for at, step in enumerate(self._steps) if step.complete]
            if complete and not self._spoiled:
                at, step = next((pair for pair in reversed(complete) if not pair[1].evaluates), complete[-1])
                self.captured = step.read(Profile(results), at)

    # Others that come in between

    @_harmless
    def _compilation_starts(self, *_: Any) -> None:
        if not self._profiling:
            return
        self._tried += 1
        self._spoiled = True
        if self._is_mine():
            self._stop()

    @_harmless
    def _give_way(self) -> None:
        if not self._over:
            self._over = self._spoiled = True
            if self._is_mine():
                self._stop()
            self.captured = None
            self._tell("profiler", _NOTE)

    def _make_way(self) -> Callable[[], None]:
        """Let a profiler of the script's own begin in our place."""
        undo: list[Callable[[], None]] = []
        for owner in (self._torch.autograd.profiler, sys.modules.get("torch.autograd.profiler_legacy")):
            for name in ("_prepare_profiler", "_enable_profiler", "_enable_profiler_legacy"):
                if hasattr(owner, name):
                    undo.append(self._make_way_for(owner, name))

        def restore() -> None:
            for each in undo:
                each()

        return restore

    def _make_way_for(self, owner: Any, name: str) -> Callable[[], None]:
        plain = getattr(owner, name)

        def begin(*arguments: Any, **keywords: Any) -> Any:
            self._give_way()
            return plain(*arguments, **keywords)

        setattr(owner, name, begin)
        return lambda: setattr(owner, name, plain)


class _Step:
    """One step as it goes on."""

    def __init__(self, training: bool) -> None:
        self.number, self.training = 0, training
        self.complete = self.called = self.evaluates = self.failed = False
        self.module_calls = self.parameters = 0
        self.settings: dict[str, str] = {}
        self._model: Callable[[], Any] | None = None  # not kept: the script may drop it, and its memory with it
        self.samples: int | None = 0
        self.tokens: int | None = 0

    def call(
        self, module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], *, evaluates: bool, again: bool
    ) -> None:
        """An outermost module is called. Of the first of the step all calls count: gradients may be accumulated.

        An optimizer that calls it again, as L-BFGS does, has no other samples for it.
        """
        self.evaluates |= evaluates
        if evaluates:
            return
        self.called = True
        if self._model is None:
            self._model = weakref.ref(module)
        elif module is self._model() and again:
            return
        if module is self._model():
            samples, tokens = _batch(arguments, keywords)
            self.samples = None if samples is None or self.samples is None else self.samples + samples
            self.tokens = None if tokens is None or self.tokens is None else self.tokens + tokens

    def read(self, profile: Profile, at: int) -> CapturedStep:
        """What the profiler saw from the mark at which this step began to the next."""
        return read_step(
            profile,
            at,
            settings=self.settings,
            number=self.number,
            training=self.training,
            module_calls=self.module_calls,
            optimizer_parameters=self.parameters,
            samples=self.samples,
            tokens=self.tokens,
        )


def _batch(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[int | None, int | None]:
    """Samples and tokens of one call: of `input_ids`, or of the tensor that comes first."""
    torch = sys.modules["torch"]
    tensors = [value for value in (*arguments, *keywords.values()) if isinstance(value, torch.Tensor)]
    first = keywords.get("input_ids", tensors[0] if tensors else None)
    if not isinstance(first, torch.Tensor) or not first.dim():
        return None, None
    is_whole = first.dtype in (torch.int64, torch.int32)
    if is_whole and first.dim() == 2:
        return first.shape[0], first.shape[0] * first.shape[1]
    return (None if is_whole else first.shape[0]), None
