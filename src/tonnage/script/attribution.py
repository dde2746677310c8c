"""Finds out what a block is for: its category, module, phase, step and the script's own line.

Hooks on modules, optimizers and the autograd engine maintain the current state, which a block takes when it is
allocated. What only shows later (that a block is a gradient or an optimizer state) is reported to the sink then. It
does not depend on how blocks are allocated, or whether the GPU is virtual.
"""

import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Protocol

from tonnage.ledger import Category
from tonnage.recording.records import BY_PHASE, MarkKind
from tonnage.script.lines import NOWHERE, LineFinder, ScriptPlace
from tonnage.script.training import facts_of_driver, facts_of_model, name_of_optimizer

if TYPE_CHECKING:
    from tonnage.script.capture import StepCapture
    from tonnage.virtual.host_memory import HostMeter

# Backward passes and optimizer steps keep their phase, whatever function they run in.
_PLAIN = ("backward", "optimizer")


class Sink(Protocol):
    """Keeps the record of blocks. `held_line`, the line that called backward, is set before backward begins."""

    held_line: str

    def mark(self, kind: MarkKind, name: str) -> None:
        """Record that this phase or step starts with the next block."""

    def at_module(self, context: int) -> None:
        """Set the current module by number; 0 is none."""

    def categorise(self, category: Category, addresses: list[int], only: Category | None) -> None:
        """Set the category of the blocks at these addresses (with `only`: if they have that category so far)."""


class Attribution:
    """The current state of the script, as seen through PyTorch's hooks."""

    def __init__(self, sink: Sink, *, frugal: bool = False) -> None:
        """With `frugal`, a model and its optimizer states are examined once, not at every step."""
        self.sink = sink
        self.observer: StepCapture | None = None
        self.host: HostMeter | None = None  # of a virtual run
        self._frugal = frugal
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self.phase = "setup"
        self._base = "setup"  # by hooks alone
        self._region = ""  # by functions on the stack: saving, generation, ...
        self._is_marking = False
        self._trained: weakref.WeakSet[Any] = weakref.WeakSet()  # outermost modules that ran in training mode
        self.step = 0
        self.category = Category.OTHER
        self.lines = LineFinder()
        self.modules: list[str] = []
        self._functions = 0  # compiled functions that are being called
        self._has_called_modules = False  # outside of such functions
        self.keywords: dict[str, Any] = {}  # the outermost module's keyword arguments
        self.contexts: list[str] = [""]
        self._context_numbers: dict[str, int] = {"": 0}
        self._paths: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._known: dict[int, weakref.ref[Any]] = {}  # parameters by id: a WeakSet would compare tensors
        self.trains = False  # whether there is an optimizer
        self._stepped = True
        self.stepping = False  # whether an optimizer step is running
        self._stepped_within = False  # stepped within a backward that still runs
        self._backward_depth = 0
        self.main_thread = threading.main_thread().ident or 0
        self._held = NOWHERE
        self.training: dict[str, str] = {}
        self._asked_driver: set[str] = set()
        self._steppers: weakref.WeakSet[Any] = weakref.WeakSet()

    # The current state

    def module_of(self, context: int) -> str:
        """Return the current module; in backward, the one whose forward created the node."""
        if context >= 0:
            return self.contexts[context]
        return self.modules[-1] if self.modules else ""

    def line(self) -> str:
        """Return the script's current line; on PyTorch's own threads, the line where the main thread waits."""
        return self.place().line

    def place(self) -> ScriptPlace:
        """Return the script's current line and its callers."""
        found = self.lines.find(sys._getframe().f_back)
        if found.line:
            return found
        return ScriptPlace(
            self._held.line or self.lines.last, found.stack + self._held.stack, found.phase or self._region
        )

    def enter(self, phase: str) -> None:
        """Start a phase, unless a function on the stack determines another."""
        self._base = phase
        self._settle()

    def at(self, place: ScriptPlace) -> None:
        """Update the phase from the functions on the stack of an allocation."""
        if place.phase != self._region and not self._is_marking:
            self._leave(self._region)
            self._region = place.phase
            self._settle()

    @contextmanager
    def within(self, region: str) -> Iterator[None]:
        """Run the body in this phase, unless an outer function determines another or this is not the main thread."""
        if threading.get_ident() != self.main_thread:
            yield
            return
        before = self.place().phase
        self._region = before or region
        self._settle()
        try:
            yield
        finally:
            self._leave(self._region)
            self._region = before
            self._settle()

    def _leave(self, region: str) -> None:
        """End the evaluation phase after a function that evaluates or saves."""
        if region in ("evaluation", "saving") and self._base == "evaluation":
            self._base = "other"

    def _settle(self) -> None:
        phase = self._base if self._base in _PLAIN else self._region or self._base
        if phase != self.phase:
            self.phase = phase
            self.category = BY_PHASE.get(phase, Category.OTHER)
            self._is_marking = True
            self.sink.mark("phase", phase)
            self._is_marking = False
            if self.observer:
                self.observer.phase_begins(phase)

    # Modules

    def module_starts(self, module: Any, arguments: tuple[Any, ...]) -> None:
        """Handle the start of a module's forward; the outermost one starts a forward phase, and maybe a step."""
        if self.host:
            self.host.tick()
        if self._is_root():
            self._has_called_modules = True
            self._root_starts([module], (*arguments, *self.keywords.values()))
            if self.observer:
                self.observer.root_starts(module, arguments, self.keywords)
        if self.observer:
            self.observer.module_starts()
        path = self._paths.get(module)
        if path is None:
            self._name(module)
            path = self._paths.get(module, type(module).__name__)
        self.modules.append(path)
        self.sink.at_module(self._context(path))

    def module_ends(self, module: Any, output: Any) -> None:
        if self.modules:
            self.modules.pop()
        self.sink.at_module(self._context(self.modules[-1]) if self.modules else 0)
        if not self.modules:
            self.keywords = {}
            self._mark_caches((output,))
            if self.observer and not self._functions:
                self.observer.root_ends(output)

    def function_starts(self, function: Any, root: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Handle the call of a compiled function: the modules that it calls are compiled with it, and call no hooks.

        `root` is what the script calls, and lives as long as the script keeps it.
        """
        if self._is_root():
            given = (*arguments, *keywords.values())
            models = modules_within(function, given)
            inputs = tuple(value for value in given if not _is_parameter(value))
            if not self._only_helps(models):
                self._root_starts(models, inputs)
                if self.observer:
                    self.observer.root_starts(root, inputs, {})
        self._functions += 1

    def function_ends(self, output: Any) -> None:
        """Handle the end of a compiled function's call."""
        self._functions -= 1
        if self.modules or self._functions:
            return
        self._mark_caches((output,))
        if self.observer:
            self.observer.root_ends(output)

    def _only_helps(self, models: list[Any]) -> bool:
        """Whether a function with these modules is part of something else: an optimizer's update, a sampler."""
        import torch

        return not (models or torch.is_grad_enabled()) and (self.trains or self._has_called_modules)

    def _is_root(self) -> bool:
        """Whether what is called now is outermost. Within a function, it is where an optimizer has stepped there."""
        import torch

        if self.modules or self._base == "backward":
            return False
        return not self._functions or (self.trains and self._stepped and torch.is_grad_enabled())

    def _root_starts(self, models: list[Any], given: tuple[Any, ...]) -> None:
        """Start a forward phase, and maybe a step: of a module, or of a function and the modules that it uses."""
        import torch

        self.at(self.place())
        infers = not torch.is_grad_enabled()
        is_training = any(model.training for model in models) or not (models or infers)
        has_trained = any(model in self._trained for model in models)
        # Without gradients, or (since people forget `no_grad`) in the evaluation mode of a module that also trains.
        evaluates = not is_training and (infers or has_trained)
        # Examine the stack and the model, once in training and once before.
        if not self._asked_driver & {"training", "evaluation" if infers else ""}:
            self._asked_driver.add("evaluation" if infers else "training")
            # In another version of a library advice is generic.
            with suppress(AttributeError, TypeError, RuntimeError, LookupError):
                facts, whole = facts_of_driver(sys._getframe())
                self.training |= facts
                for model in models:
                    self.training |= facts_of_model(model)
                if whole is not None:
                    self._name(whole)
        if self.trains and (evaluates or (infers and self._region == "generation")):
            # Between training steps: not a step of its own.
            self.enter(self._base if self._base == "forward" else "evaluation")
        else:
            if not infers:
                self._trained.update(model for model in models if model.training)
            if self._stepped or (infers and self._base != "forward"):
                self._stepped = False
                self.step += 1
                self.sink.mark("step", str(self.step))
            self._stepped |= infers
            self.enter("forward")
        for model in models:
            if self._is_new(model):
                self.mark_model(model)
        self.mark(Category.INPUTS, _tensors(given), only=Category.OTHER)
        self._mark_caches(given)

    def _name(self, root: Any) -> None:
        prefix = f"{self.modules[-1]}." if self.modules and self.modules[-1] else ""
        for path, module in root.named_modules():
            self._paths.setdefault(module, (prefix + path).rstrip("."))

    def _context(self, path: str) -> int:
        number = self._context_numbers.setdefault(path, len(self.contexts))
        if number == len(self.contexts):
            self.contexts.append(path)
        return number

    # The training framework

    def optimizer_made(self, optimizer: Any) -> None:
        """Note that the script trains, with this optimizer."""
        self.trains = True
        known = self.training.get("optimizers", "").split()
        if (name := name_of_optimizer(optimizer)) and name not in known:
            self.training["optimizers"] = " ".join([*known, name])

    # Backward and optimizers

    def backward_starts(self) -> None:
        """Handle the start of backward. Its threads have no Python frames of the script, so the line is kept."""
        if not self._backward_depth:
            self._held = self.place()
            self.at(self._held)
            self.sink.held_line = self._held.line
            self.enter("backward")
        self._backward_depth += 1

    def backward_ends(self) -> None:
        """Handle the end of backward: the parameters now have gradients."""
        self._backward_depth -= 1
        if not self._backward_depth:
            if not self._frugal:
                self.mark_gradients(self._parameters())
            self._held = NOWHERE
            if self._stepped_within and self.observer:
                self.observer.optimizer_ends()
            self._stepped_within = False
            # Backward in the closure of an optimizer step: the step itself follows.
            self.enter("optimizer" if self.stepping else "other")

    def step_starts(self, optimizer: Any) -> None:
        """Handle the start of an optimizer step, possibly inside backward."""
        self.trains = self.stepping = True
        self.at(self.place())
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not self._frugal or optimizer not in self._seen:
            self._remember(parameters)
            self.mark(Category.PARAMETERS, parameters)
        self.mark_gradients(parameters)
        self._steppers.add(optimizer)
        self.training["stepping"] = str(len(self._steppers))
        self.enter("optimizer")
        if self.observer:
            self.observer.optimizer_starts(optimizer)

    def step_ends(self, optimizer: Any) -> None:
        """Handle the end of an optimizer step, and mark its states."""
        self._stepped, self.stepping = True, False
        if self._is_new(optimizer):
            self.mark(Category.OPTIMIZER_STATES, _tensors(optimizer.state.values()))
        self.enter("backward" if self._backward_depth else "other")
        self._stepped_within = self._backward_depth > 0
        if self.observer and not self._stepped_within:
            self.observer.optimizer_ends()

    def _is_new(self, thing: Any) -> bool:
        """Whether to examine it: always, unless frugal and seen before."""
        is_new = not self._frugal or thing not in self._seen
        if self._frugal:
            self._seen.add(thing)
        return is_new

    # Categories of blocks

    def mark(self, category: Category, tensors: Iterable[Any], *, only: Category | None = None) -> None:
        """Set the category of these tensors' blocks (with `only`: if they have that category so far)."""
        own = [part for tensor in tensors if tensor is not None for part in _parts(tensor)]
        found = [address_of(t) for t in own if t.is_cuda and _has_storage(t)]
        if found:
            self.sink.categorise(category, found, only)
        if self.host and only is None:
            self.host.categorise(category, [address_of(t) for t in own if t.is_cpu and _has_storage(t)])

    def mark_model(self, module: Any) -> None:
        parameters = list(module.parameters())
        self._remember(parameters)
        self.mark(Category.PARAMETERS, parameters)
        self.mark(Category.PARAMETERS, module.buffers(), only=Category.OTHER)

    def mark_gradients(self, parameters: Iterable[Any]) -> None:
        self.mark(Category.GRADIENTS, [p.grad for p in parameters])

    def _remember(self, parameters: Iterable[Any]) -> None:
        for parameter in parameters:
            if id(parameter) not in self._known:
                self._known[id(parameter)] = weakref.ref(parameter)

    def _parameters(self) -> list[Any]:
        return [found for reference in self._known.values() if (found := reference()) is not None]

    def finish(self) -> None:
        """Mark remaining gradients at the end, or where the script died."""
        self.mark_gradients(self._parameters())
        if self.observer:
            self.observer.finish()

    def _mark_caches(self, values: Iterable[Any]) -> None:
        for value in values:
            cache = getattr(value, "past_key_values", value)
            for layer in getattr(cache, "layers", ()) if type(cache).__name__.endswith("Cache") else ():
                pair = [getattr(layer, name, None) for name in ("keys", "values")]
                self.mark(Category.KV_CACHE, [t for t in pair if hasattr(t, "is_cuda")])


def _parts(tensor: Any) -> list[Any]:
    """Return the plain tensors that hold a tensor's data.

    A sharded tensor has a local part, a sparse one indices and values, and a wrapper subclass (quantized and float8
    weights, jagged tensors) lists its parts; the wrapper's own storage must not be accessed.
    """
    torch = sys.modules["torch"]
    tensor = getattr(tensor, "_local_tensor", tensor)
    if hasattr(tensor, "__tensor_flatten__"):
        return [part for name in tensor.__tensor_flatten__()[0] for part in _parts(getattr(tensor, name))]
    if isinstance(tensor, torch.Tensor) and tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return [tensor]


def _is_parameter(value: Any) -> bool:
    """Whether this argument of a function is a tensor that it trains."""
    return isinstance(value, sys.modules["torch"].Tensor) and value.requires_grad and value.is_leaf


def modules_within(function: Any, given: Iterable[Any], depth: int = 3) -> list[Any]:
    """Return the modules that a function may use: of its object, its arguments, its closure and global variables.

    Functions that it calls by a global name or from its closure are looked into as well.
    """
    found: list[Any] = []
    code, scope = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    owner = getattr(function, "__self__", None)
    values = [owner, *getattr(owner, "__dict__", {}).values(), *given]
    values += [scope[name] for name in (code.co_names if code else ()) if name in scope]
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # a variable that is not set yet
            values.append(cell.cell_contents)
    for value in values:
        if isinstance(value, sys.modules["torch"].nn.Module):
            found.append(value)
        elif depth and isinstance(value, (FunctionType, MethodType)):
            inner = getattr(value, "__wrapped__", value)
            found += modules_within(inner, (), depth - 1)
    return list({id(module): module for module in found}.values())


def _has_storage(tensor: Any) -> bool:
    """Whether the storage is accessible: not for tensors wrapped by torch.func or for wrapper subclasses."""
    torch = sys.modules["torch"]
    if tensor.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return True
    # A lazy module's parameters raise ValueError before its first call.
    with suppress(RuntimeError, NotImplementedError, ValueError):
        address_of(tensor)
        return True
    return False


def address_of(tensor: Any) -> int:
    """Return the address of the storage.

    Accessing the storage itself would leave a reference to it, and autograd accumulates gradients in place only if it
    holds the only reference.
    """
    return int(tensor.data_ptr() - tensor.storage_offset() * tensor.element_size())


def _tensors(values: Iterable[Any], depth: int = 4) -> list[Any]:
    found: list[Any] = []
    tensor = sys.modules["torch"].Tensor
    for value in values:
        if isinstance(value, tensor):
            found.append(value)
        elif depth and isinstance(value, (list, tuple, set)):
            found.extend(_tensors(value, depth - 1))
        elif depth and isinstance(value, dict):
            found.extend(_tensors(value.values(), depth - 1))
    return found
