"""Captures the calls of a typical step with torch's profiler, which runs only during the first steps of a run.

| the script         | a step is                                                                                    |
|--------------------|----------------------------------------------------------------------------------------------|
| has an optimizer   | from the end of one optimizer's step to the end of the next, the first from its first forward |
| has none           | from one call of an outermost module to the next, the last one to the end of the run          |

The last one is kept; if it is also the first, without the calls that create optimizer states. If a step calls very many
operators, one is enough, because profiling each costs time. A step in which something is compiled, or that is interrupted
by an evaluation, is not typical and is replaced by another. The profiler is started once (again only after a
compilation), and a mark among its events shows where a step begins: restarting it within an open region would make torch
write to freed memory. If the script profiles itself, nothing is captured.
"""

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from typing import TYPE_CHECKING, Any

from tonnage.clock.captured import CapturedStep
from tonnage.garbage import no_collection
from tonnage.script import profiler
from tonnage.script.profiled import RECOMPUTE, read_step
from tonnage.script.wrapping import wrap

if TYPE_CHECKING:
    from tonnage.script.attribution import Attribution

STEPS = 2
# Steps to try if some compile or evaluate.
_MOST_STEPS = 6
# In blocks, with about four operators for each, and about a kilobyte per operator.
_MOST_THOUSANDS = 256
_ENOUGH_THOUSANDS = 4
_FACTS = ("number", "training", "module_calls", "optimizer_parameters", "samples", "tokens")
_TOO_LONG = "Its steps call too many operators to capture one, so nothing is known of its time."
_NOTE = "The script profiles itself, so its operators were not captured, and nothing is known of its time."


def _harmless(method: Any) -> Any:
    """Catch all errors, so that the script is not affected."""

    @wraps(method)
    def guarded(self: "StepCapture", *arguments: Any) -> None:
        try:
            with no_collection():
                method(self, *arguments)
        except Exception as problem:
            self.give_up(f"{type(problem).__name__}: {problem}")

    return guarded


class StepCapture:
    """Observes the steps of a script between `install` and `finish`; `captured` is the one that was kept."""

    def __init__(self, who: "Attribution", tell: Callable[[str, str], None]) -> None:
        """Take phases and steps from `who`, and report assumptions to `tell`."""
        self._who = who
        self._tell = tell
        self.captured: CapturedStep | None = None
        self._process = os.getpid()
        self._profiling = self._over = self._asks_dynamo = False
        self._spoiled = False  # by a compilation, so not to be kept
        self._paused = 0
        self._has_streams = False  # streams created by the script
        self._steps: list[_StepInProgress] = []
        self._tried = 0
        self._thousands = 0

    def install(self) -> Callable[[], None]:
        """Start observing; the returned function undoes it."""
        import torch

        self._who.observer = self

        def begin(plain: Any, /, *arguments: Any, **keywords: Any) -> Any:
            self._give_way()
            return plain(*arguments, **keywords)

        def make_stream(*arguments: Any, **keywords: Any) -> Any:
            self._has_streams = True
            return new_stream(*arguments, **keywords)

        undo = ExitStack()
        legacy = sys.modules.get("torch.autograd.profiler_legacy")
        begins = "_prepare_profiler", "_enable_profiler", "_enable_profiler_legacy", "_add_execution_trace_observer"
        for owner in (torch.autograd.profiler, torch.profiler.profiler, legacy):
            for name in begins:
                if hasattr(owner, name):
                    wrap(undo, owner, name, begin)
        kind, new_stream = torch.cuda.Stream, torch.cuda.Stream.__new__
        kind.__new__ = staticmethod(make_stream)
        undo.callback(setattr, kind, "__new__", staticmethod(new_stream))
        return undo.close

    def give_up(self, why: str) -> None:
        self._over = True
        self._tell("profiler", f"The operators of a step could not be captured: {why[:160]}")
        if self._profiling:
            self._profiling = False
            with suppress(RuntimeError):
                profiler.end()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude what runs in this context from steps, and drop the step in progress."""
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
        """Start or continue a step when an outermost module is called."""
        if self._over or self._paused or not self._is_mine():
            return
        who = self._who
        if self._profiling and self._steps[-1].training != who.trains:
            self._stop()  # what ran before there was an optimizer is not a training step
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
        """Note whether the call failed, which is when there is no output."""
        if self._profiling and self._is_mine():
            self._steps[-1].failed |= output is None

    @_harmless
    def phase_begins(self, phase: str) -> None:
        if self._profiling and self._is_mine():
            profiler.mark(f"phase {phase}")

    @_harmless
    def module_starts(self) -> None:
        """Count module calls, and mark recomputation."""
        if self._profiling:
            self._steps[-1].module_calls += 1
            if threading.get_ident() != self._who.main_thread:
                profiler.mark(RECOMPUTE)  # autograd's engine calls modules only to recompute them
            if self._thousands > _MOST_THOUSANDS and self._is_mine():
                self._over = self._spoiled = True
                self._stop()
                self._tell("profiler", _TOO_LONG)

    def goes_on(self) -> None:
        """Count blocks, in thousands: what the profiler keeps takes memory, too."""
        self._thousands += self._profiling

    @_harmless
    def optimizer_starts(self, optimizer: Any) -> None:
        """Count the parameters of the optimizer that is about to step."""
        if self._profiling:
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            self._steps[-1].optimizer_parameters += sum(p.grad is not None for p in parameters)

    @_harmless
    def optimizer_ends(self) -> None:
        """End a step after an optimizer step, if a forward came before. Further optimizer steps belong to the next one."""
        if self._profiling and self._is_mine() and self._steps[-1].called:
            self._next_step()

    @_harmless
    def finish(self) -> None:
        if self._profiling and self._is_mine():
            if not self._who.trains and self._steps[-1].called and not self._steps[-1].failed:
                self._next_step()
            self._stop()
        self._over = True

    # The profiler

    def _is_mine(self) -> bool:
        """Whether this is the main thread of the original process, the only one that is profiled."""
        return threading.get_ident() == self._who.main_thread and os.getpid() == self._process

    def _start(self) -> None:
        if profiler.is_on() or self._tried >= _MOST_STEPS:
            self._over = True
            return
        # Compilation runs every operator many times, on tensors without memory.
        callbacks = sys.modules.get("torch._dynamo.callback")
        if callbacks is not None and not self._asks_dynamo:
            self._asks_dynamo = True
            callbacks.callback_handler.register_start_callback(self._compilation_starts)
        profiler.begin(follows_nodes=self._has_streams)
        self._profiling, self._spoiled = True, False
        self._steps = []
        self._begin_step()

    def _begin_step(self) -> None:
        self._steps.append(_StepInProgress(self._who.trains))
        profiler.mark("step")
        profiler.mark(f"phase {self._who.phase}")

    def _next_step(self) -> None:
        done = self._steps[-1]
        done.complete, done.settings = True, profiler.settings()
        self._tried += 1
        self._begin_step()
        typical = sum(step.complete and not step.evaluates for step in self._steps)
        if typical >= (STEPS if self._thousands < _ENOUGH_THOUSANDS else 1) or self._tried >= _MOST_STEPS:
            self._stop()
            self._over = True

    def _stop(self) -> None:
        if not self._profiling:
            return
        self._profiling = False
        with no_collection():
            results = profiler.end()
            # Keep the last complete step, preferably one without an evaluation.
            complete = [(at, step) for at, step in enumerate(self._steps) if step.complete]
            if complete and not self._spoiled:
                at, step = next((pair for pair in reversed(complete) if not pair[1].evaluates), complete[-1])
                facts = {name: getattr(step, name) for name in _FACTS}
                self.captured = read_step(results, at, settings=step.settings, **facts)

    # Interruptions

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
        """Stop our profiler when the script starts its own."""
        if not self._over:
            self._over = self._spoiled = True
            if self._is_mine():
                self._stop()
            self.captured = None
            self._tell("profiler", _NOTE)


class _StepInProgress:
    """One step in progress."""

    def __init__(self, training: bool) -> None:
        self.number, self.training = 0, training
        self.complete = self.called = self.evaluates = self.failed = False
        self.module_calls = self.optimizer_parameters = 0
        self.settings: dict[str, str] = {}
        self._model: Callable[[], Any] | None = None  # weak, because the script may drop it to free its memory
        self.samples: int | None = 0
        self.tokens: int | None = 0

    def call(
        self, module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], *, evaluates: bool, again: bool
    ) -> None:
        """Count a call of an outermost module. All calls of the step's first module count: gradients may be
        accumulated.

        An optimizer that calls it again, as L-BFGS does, uses the same samples. A call that `torch.jit` traces makes a
        graph and is no part of a step: its sizes are values of that graph.
        """
        self.evaluates |= evaluates
        if evaluates or sys.modules["torch"].jit.is_tracing():
            return
        self.called = True
        is_first = self._model is None
        self._model = self._model or weakref.ref(module)
        if module is self._model() and (is_first or not again):
            samples, tokens = _batch(arguments, keywords)
            self.samples = None if samples is None or self.samples is None else self.samples + samples
            self.tokens = None if tokens is None or self.tokens is None else self.tokens + tokens


def _batch(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[int | None, int | None]:
    """Return the samples and tokens of one call, by `input_ids` or the first tensor."""
    torch = sys.modules["torch"]
    tensors = [value for value in (*arguments, *keywords.values()) if isinstance(value, torch.Tensor)]
    first = keywords.get("input_ids", tensors[0] if tensors else None)
    if not isinstance(first, torch.Tensor) or not first.dim():
        return None, None
    sizes = [size if isinstance(size, int) else None for size in first.shape]  # None: a symbol of torch.export
    samples, tokens = sizes[0], sizes[1] if len(sizes) == 2 else None
    is_whole = first.dtype in (torch.int64, torch.int32)
    if not is_whole:
        return samples, None
    if samples is None or tokens is None:
        return None, None
    return samples, samples * tokens
