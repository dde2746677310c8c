"""Run a forward pass again, skipping what was saved and what is not read.

The first pass stores the outputs of chosen operators. The second returns those, skips what backward does not read
(usually a block's last product), and runs the rest. It does not know modules or autograd functions.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tonnage.errors import TonnageError
from tonnage.fit.choose.frontier import needed
from tonnage.fit.moving.saved_tensors import storage_key
from tonnage.fit.recomputing.operators import (
    UNCOUNTED,
    Layout,
    OperatorRecorder,
    RecordedOperator,
    operations_clock,
    profile_of,
)
from tonnage.fit.recomputing.remembered import States

# Below this, skipping a product saves less time than dispatching every operator costs the host.
_WORTHWHILE_OPERATIONS = 2e11
_MOST_PLANS = 8  # one per set of input shapes

Run = Callable[[], tuple[Tensor, ...]]
Around = Callable[[], AbstractContextManager[Any]]


class OperatorsDiffer(TonnageError, RuntimeError):
    """Raised if a block calls other operators than in its first run."""


@dataclass
class Stash:
    """The outputs that the first pass stored, by operator index."""

    outputs: dict[int, tuple[OpOverload, Any]] = field(default_factory=dict)
    random: dict[int, States] = field(default_factory=dict)
    differs: str | None = None  # why the outputs are not the expected ones


@dataclass(frozen=True)
class ReplayPlan:
    """The known operators of a pass for one set of input shapes."""

    functions: tuple[OpOverload, ...]
    skipped: Mapping[int, tuple[Layout, ...]]  # with layouts of the placeholders for their outputs


class _EachOperator(TorchDispatchMode):
    """Runs `call(index, operator, args, kwargs)` in place of each operator."""

    def __init__(self, call: Callable[[int, OpOverload, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self.call = call
        self.count = 0

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in UNCOUNTED:
            return func(*args, **(kwargs or {}))
        self.count += 1
        return self.call(self.count - 1, func, args, kwargs or {})


def is_random(func: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _detached(outputs: Any) -> Any:
    """Return tensors over the same storages, free of autograd metadata."""
    return tree_map_only(Tensor, Tensor.detach, outputs)


class Replayer:
    """Runs a forward twice, by `first` and `again`. Operators in `kept` (index -> name, or None) are stored."""

    def __init__(self, kept: Mapping[int, str | None]) -> None:
        self.kept = kept
        self._plans: dict[object, ReplayPlan | None] = {}

    def first(self, run: Run, random_states: Callable[[], States]) -> tuple[tuple[Tensor, ...], Stash]:
        """Run with gradients enabled, so that operators match the second pass; nothing is saved for backward."""
        stash = Stash()

        def call(index: int, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if is_random(func):
                stash.random[index] = random_states()
            outputs = func(*args, **kwargs)
            if index in self.kept:
                # Continue anyway: the pass may have changed buffers already, and its outputs are right.
                if self.kept[index] not in (None, str(func)):
                    stash.differs = f"operator {index} was {self.kept[index]} when it was chosen and is {func} now"
                stash.outputs[index] = func, _detached(outputs)
            return outputs

        mode = _EachOperator(call)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda t: None, lambda t: t), mode:
            outputs = run()
        missing = [index for index in self.kept if index not in stash.outputs]
        if missing and not stash.differs:
            stash.differs = f"operator {missing[0]} was to be kept, and only {mode.count} are called"
        return tuple(output.detach() for output in outputs), stash

    def again(
        self, run: Run, shapes: object, stash: Stash, set_random: Callable[[States], None], around: Around = nullcontext
    ) -> tuple[Tensor, ...]:
        """Run again, with gradients enabled by the caller. `around` restores what a pass reads, on each attempt."""
        learns = shapes not in self._plans and len(self._plans) < _MOST_PLANS
        plan = self._plans.get(shapes)
        watches = learns or plan or stash.outputs
        try:
            with around(), _EachOperator(_second_run(stash, plan, set_random)) if watches else nullcontext():
                if not learns:
                    return run()
                recorder = OperatorRecorder(operations_clock)
                with recorder.saving(hold=True), recorder:
                    outputs = run()
                self._plans[shapes] = None if recorder.overlooked else self._plan(recorder.operators)
                return outputs
        except OperatorsDiffer:
            # Retry without the plan, then without the stored outputs.
            self._plans[shapes] = None
        return self.again(run, shapes, stash if plan else Stash(), set_random, around)

    def _plan(self, operators: Sequence[RecordedOperator]) -> ReplayPlan | None:
        profile = [profile_of(index, operator) for index, operator in enumerate(operators)]
        # Without RNG states per operator, all random operators must run, in order.
        always = [
            i for i, o in enumerate(operators) if not o.can_be_left_out or (is_random(o.function) and not self.kept)
        ]
        running = needed(profile, self.kept, always)
        idle = [i for i, o in enumerate(operators) if not o.is_view and i not in running and i not in self.kept]
        if sum(profile[index].seconds for index in idle) < _WORTHWHILE_OPERATIONS and not self.kept:
            return None
        return ReplayPlan(tuple(o.function for o in operators), {index: operators[index].layouts for index in idle})


def _second_run(stash: Stash, plan: ReplayPlan | None, set_random: Callable[[States], None]) -> Callable[..., Any]:
    """Return what calls an operator in the second pass, or stands for it."""
    leaves = tree_leaves([outputs for _, outputs in stash.outputs.values()])
    storages = {storage_key(leaf) for leaf in leaves if isinstance(leaf, Tensor)}

    def call(index: int, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kept = stash.outputs.get(index)
        if kept is not None and kept[0] is not func:
            raise OperatorsDiffer(f"Operator {index} is {func} now and was {kept[0]} before.")
        if plan is not None and (index >= len(plan.functions) or plan.functions[index] is not func):
            raise OperatorsDiffer(f"Operator {index} is {func} now and was another before.")
        if kept is not None:
            return _detached(kept[1])
        first = args[0] if args else None
        if func._schema.is_mutable and isinstance(first, Tensor) and storage_key(first) in storages:
            return first  # the stored tensor already has its final value
        if plan is not None and index in plan.skipped:
            if func._schema.is_mutable:
                return first
            # Uninitialized tensors of the right shape.
            layouts = plan.skipped[index]
            made = [torch.empty_strided(shape, stride, dtype=dtype, device=at) for shape, stride, dtype, at in layouts]
            return made[0] if len(func._schema.returns) == 1 else tuple(made)
        if index in stash.random:
            set_random(stash.random[index])
        return func(*args, **kwargs)

    return call
