"""Test on the first rows of the sample whether a block can run twice, before anything is applied.

During one loss each block runs as usual and then again as backward would run it. The two runs show what the block
changes in its modules and whether it is deterministic; the graph of the loss shows whether gradients flow other than
through its arguments and outputs. This module does not know techniques.
"""

import gc
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import Context
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from tonnage.fit.modules import eagerly, replace_forward
from tonnage.fit.recomputing.remembered import Generators, Memory, Slot, as_before, held_generators
from tonnage.fit.recomputing.rerun import Forward, Surroundings, without_cache
from tonnage.fit.stepping.batches import take_rows
from tonnage.fit.training import Batch, Training
from tonnage.fit.virtual import on_virtual_gpu

_ROWS = 2  # batch norms need more than one
_HELD = "something outside of it holds tensors that it makes, and would hold those of a second run too"
_TOLERANCE = 16  # in units of rounding: atomic additions are unordered

_next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


@dataclass
class RerunFinding:
    """What it takes to run a block twice."""

    reason: str | None = None  # why it is impossible
    slots: tuple[Slot, ...] = ()  # buffers and attributes that it changes
    # How gradients bypass its arguments and outputs; the graph of the first run must then be kept.
    beside: str | None = None


# By model: fingerprint at the time of the trial, and the findings.
_tried: WeakKeyDictionary[nn.Module, tuple[object, dict[str, RerunFinding]]] = WeakKeyDictionary()


def find_out(training: Training, names: Sequence[str]) -> dict[str, RerunFinding]:
    """Return what each of these modules does when it runs twice, cached while the training is unchanged."""
    # What can change how a block runs, as numbers: objects would keep the model alive.
    modules = tuple(
        (id(each), each.training, id(vars(each).get("forward")), *each._forward_hooks, *each._forward_pre_hooks)
        for each in training.model.modules()
    )
    parameters = tuple((p.requires_grad, bool(p._backward_hooks)) for p in training.model.parameters())
    now = id(training.sample), id(training.loss), tuple(training.applied), modules, parameters
    before, findings = _tried.get(training.model, (None, {}))
    known = findings if before == now else {}
    missing = [name for name in names if name not in known]
    if missing:
        known = known | try_blocks(training, missing)
        _tried[training.model] = now, known
    return {name: known[name] for name in names}


def try_blocks(training: Training, names: Sequence[str], *, twice: bool = True) -> dict[str, RerunFinding]:
    """Run a loss with each block once or twice, if possible without what it saves. The training is left unchanged."""

    def tried(*, twice: bool, saves: bool) -> dict[str, RerunFinding]:
        trial = partial(_RerunTrial, training, names, twice=twice, saves=saves)
        try:
            return trial().run(take_rows(training.sample, slice(0, _ROWS)))
        except torch.OutOfMemoryError:
            raise
        except Exception:  # the model cannot handle so few rows
            return trial().run(training.sample)

    # A loss that differentiates needs saved tensors; what a second run stores may disturb the loss.
    for again, saves in [(True, False), (True, True)] if twice else [(False, False)]:
        try:
            return tried(twice=again, saves=saves)
        except torch.OutOfMemoryError:
            raise
        except Exception:
            continue
    return tried(twice=False, saves=True)


@contextmanager
def left_alone(training: Training) -> Iterator[None]:
    """Restore buffers, attributes and random generators on exit. Compiled code runs eagerly."""
    memory = Memory(training.model, has_values=not on_virtual_gpu(training.device))
    generators = Generators(training.device, held_generators(training.model))
    states = generators.states()
    try:
        with as_before(training.loss, training.model), eagerly(), training.forward_pass():
            yield
    finally:
        # FSDP keeps gathered parameters until a backward pass, and none comes.
        kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
        for module in training.model.modules():
            if isinstance(module, kind):
                module.reshard()
        generators.set(states)
        memory.restore()


@dataclass(eq=False)
class _Run:
    """One run of a block; the graph nodes it made are numbered from `start` up to `stop`."""

    name: str
    outer: "_Run | None"
    second: bool
    start: int = field(default_factory=_next_node_number)
    stop: int = sys.maxsize
    entries: set[Node] = field(default_factory=set)  # nodes that produced its arguments
    leaves: set[int] = field(default_factory=set)  # ids of its parameters, and of arguments that are leaves
    exits: set[Node] = field(default_factory=set)  # nodes that its outputs passed through


class _RerunTrial:
    """One loss, in which every named module runs twice."""

    def __init__(self, training: Training, names: Sequence[str], *, twice: bool, saves: bool) -> None:
        self._training = training
        self._twice = twice
        self._saves = saves
        self._has_values = not on_virtual_gpu(training.device)
        self._blocks = {name: training.model.get_submodule(name) for name in names}
        self._findings = {name: RerunFinding() for name in names}
        self._runs: list[_Run] = []
        self._under_way: list[_Run] = []

    def run(self, batch: Batch) -> dict[str, RerunFinding]:
        with left_alone(self._training), torch.enable_grad(), ExitStack() as stack:
            for name, block in self._blocks.items():
                stack.callback(replace_forward(block, self._tried(name, block, block.forward)))
            loss = self._training.loss(self._training.model, batch)
            self._look_beside(loss)
            if any(finding.beside for finding in self._findings.values()):
                # Nothing outside the block's modules may still hold tensors of a second run.
                gc.collect()
                for tensor in (thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)):
                    for run in self._around(tensor.grad_fn):
                        if run.second and self._findings[run.name].beside:
                            self._findings[run.name].reason = _HELD
        for name, finding in self._findings.items():
            if any(parameter._backward_hooks for parameter in self._blocks[name].parameters()):
                finding.beside = "a hook changes the gradient of one of its parameters"
            if finding.beside and not self._twice:
                finding.reason = finding.reason or f"{finding.beside}, and it cannot be run twice on the sample"
        return self._findings

    def _tried(self, name: str, block: nn.Module, forward: Forward) -> Forward:
        def tried(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or (self._under_way and self._under_way[-1].second):
                return forward(*args, **kwargs)
            leaves, spec = tree_flatten(without_cache(args, kwargs))
            surroundings = Surroundings.now(leaves, block.parameters(), held_generators(block))
            memory = Memory(block, has_values=self._has_values)
            finding = self._findings[name]
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]
            written: dict[str, list[Tensor]] = {"arguments": tensors, "parameters": list(block.parameters())}
            versions = {what: [tensor._version for tensor in of] for what, of in written.items()}
            # First run.
            with self._running(name) as run:
                given = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
                run.entries = {tensor.grad_fn for tensor in given if tensor.grad_fn is not None}
                run.leaves = {id(tensor) for tensor in (*given, *block.parameters())}
                args, kwargs = tree_unflatten(leaves, spec)
                outputs = forward(*args, **kwargs)
            for what, of in written.items():
                if versions[what] != [tensor._version for tensor in of]:
                    finding.reason = f"it writes into its {what}"
            changed = memory.changed()
            finding.slots = tuple(dict.fromkeys((*finding.slots, *changed)))
            # Second run.
            if self._twice and finding.reason is None:
                surroundings = replace(surroundings, slots=tuple(changed), remembered=tuple(changed.values()))
                fresh = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in leaves]
                args, kwargs = tree_unflatten(fresh, spec)
                with surroundings.again(), self._running(name, second=True):
                    # As on autograd's own threads, which do not see the caller's context variables.
                    again = Context().run(forward, *args, **kwargs)
                if self._has_values and not _same(outputs, again):
                    finding.reason = "it gives other values when it runs again"

            def leave(tensor: Tensor) -> Tensor:
                if not tensor.requires_grad:
                    return tensor
                left = tensor.clone()
                assert left.grad_fn is not None
                run.exits.add(left.grad_fn)
                return left

            return tree_map_only(Tensor, leave, outputs)

        return tried

    @contextmanager
    def _running(self, name: str, *, second: bool = False) -> Iterator[_Run]:
        run = _Run(name, self._under_way[-1] if self._under_way else None, second)
        self._runs.append(run)
        self._under_way.append(run)
        try:
            with nullcontext() if self._saves else saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):
                yield run
        finally:
            self._under_way.pop()
            run.stop = _next_node_number()

    def _look_beside(self, loss: Tensor) -> None:
        """Walk the graph of the loss: edges into and out of a run must belong to its arguments and outputs."""
        waiting: list[tuple[Node | None, Node]] = [(None, loss.grad_fn)] if loss.grad_fn is not None else []
        seen = set[Node]()
        while waiting:
            later, node = waiting.pop()
            inside, inside_later = self._around(node), self._around(later)
            for run in (run for run in inside if run not in inside_later):
                finding = self._findings[run.name]
                if run.second:
                    finding.reason = "something outside of it holds tensors that it makes, and would hold others"
                elif later not in run.exits:
                    finding.beside = "the loss reads a tensor of it that it does not return"
            for run in (run for run in inside_later if run not in inside and not run.second):
                if node not in run.entries and id(getattr(node, "variable", None)) not in run.leaves:
                    beside = "it reads a tensor that is neither its argument nor its own parameter"
                    self._findings[run.name].beside = beside
            if node not in seen:
                seen.add(node)
                waiting.extend((node, before) for before, _ in node.next_functions if before is not None)

    def _around(self, node: Node | None) -> list[_Run]:
        """Return the runs that made this node, innermost first."""
        number, found = node._sequence_nr() if node is not None else -1, []
        index = bisect_right(self._runs, number, key=lambda run: run.start)
        run = self._runs[index - 1] if index else None
        while run is not None:
            if number < run.stop:
                found.append(run)
            run = run.outer
        return found


def _same(outputs: Any, again: Any) -> bool:
    some, others = ([leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)] for tree in (outputs, again))
    if [tensor.shape for tensor in some] != [tensor.shape for tensor in others]:
        return False
    return all(_close(one.detach(), other.detach()) for one, other in zip(some, others, strict=True))


def _close(one: Tensor, other: Tensor) -> bool:
    """Compare up to the rounding of sums in another order."""
    if not one.is_floating_point() or torch.equal(one, other):
        return torch.equal(one, other)
    scale = torch.linalg.vector_norm(one.double().nan_to_num())
    difference = torch.linalg.vector_norm((one.double() - other.double()).nan_to_num())
    return bool(difference <= _TOLERANCE * torch.finfo(one.dtype).eps * scale)
