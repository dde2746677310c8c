"""What a block is for: its category, module, phase, step and the script's own line.

Hooks on modules, optimizers and the autograd engine keep the present state; a block takes it when it is made. What only
shows later (this block is a gradient, that one an optimizer's state) is told to the sink then. It does not know how
blocks are allocated, nor whether the GPU is virtual.
"""

import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from tonnage.ledger import Category
from tonnage.recording.records import MarkKind
from tonnage.script.lines import NOWHERE, LineFinder, Place
from tonnage.script.training import facts_of_driver, facts_of_model, name_of_optimizer

_BY_PHASE = {
    "setup": Category.OTHER,
    "forward": Category.ACTIVATIONS,
    "evaluation": Category.ACTIVATIONS,
    "generation": Category.ACTIVATIONS,
    "backward": Category.ACTIVATIONS,
    "optimizer": Category.WORKSPACE,
}
# Whatever function they run in, a backward pass and an optimizer's step are told as such.
_PLAIN = ("backward", "optimizer")


class Sink(Protocol):
    """Whoever keeps the record of blocks; it is told the line that backward was called from before backward begins."""

    held_line: str

    def mark(self, kind: MarkKind, name: str) -> None:
        """From the next block on, this phase or step runs."""

    def at_module(self, context: int) -> None:
        """From now on the module of this number is at work; 0 is none."""

    def categorise(self, category: Category, addresses: list[int], only: Category | None) -> None:
        """The blocks at these addresses belong to the category (with `only`: if they belonged to that one so far)."""


class HostLedger(Protocol):
    """Whoever counts tensors of the host."""

    def categorise(self, category: Category, addresses: Iterable[int]) -> None:
        """The tensors at these addresses belong to the category."""

    def tick(self) -> None:
        """Some time may have passed."""

    def event(self, kind: int, address: int, size: int, operator: str) -> None:
        """A large block of the host was made, dropped, pinned or read."""

    def card_used(self) -> None:
        """The card's context is there, and maybe another library of CUDA."""


class Observer(Protocol):
    """Whoever wants to know where steps begin and end."""

    def root_starts(self, module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """An outermost module is called; the phase and step are those of the call."""

    def root_ends(self, output: Any) -> None:
        """Its call is over; without an output where it failed."""

    def module_starts(self) -> None:
        """Any module is called."""

    def phase_begins(self, phase: str) -> None:
        """From here on, this phase runs."""

    def optimizer_starts(self, optimizer: Any) -> None:
        """An optimizer is about to step."""

    def optimizer_ends(self) -> None:
        """It has; told when no backward runs any more, if it stepped within one."""

    def goes_on(self) -> None:
        """Another thousand blocks, or so, were made or dropped."""

    def finish(self) -> None:
        """The run ends."""


class Attribution:
    """The present state of the script, as seen through PyTorch's hooks."""

    def __init__(self, sink: Sink, *, frugal: bool = False) -> None:
        """Frugal: a model and its optimizer's states are looked at once, not at every step."""
        self.sink = sink
        self.observer: Observer | None = None
        self.host: HostLedger | None = None
        self._frugal = frugal
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self.phase = "setup"
        self._base = "setup"  # by hooks alone
        self._region = ""  # by the functions that are at work: saving, generation, ...
        self._is_marking = False
        self._trained: weakref.WeakSet[Any] = weakref.WeakSet()  # outermost modules that ran in training mode
        self.step = 0
        self.category = Category.OTHER
        self.lines = LineFinder()
        self.modules: list[str] = []
        self.keywords: dict[str, Any] = {}  # what the outermost module was given by name
        self.contexts: list[str] = [""]
        self._context_numbers: dict[str, int] = {"": 0}
        self._paths: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._known: dict[int, weakref.ref[Any]] = {}  # parameters by id: a WeakSet would compare tensors
        self.trains = False  # whether there is an optimizer
        self._stepped = True
        self.stepping = False  # whether an optimizer is at it
        self._stepped_within = False  # a backward that still runs
        self._backward_depth = 0
        self.main_thread = threading.main_thread().ident or 0
        self._held = NOWHERE
        self.training: dict[str, str] = {}
        self._asked_driver: set[str] = set()
        self._steppers: weakref.WeakSet[Any] = weakref.WeakSet()

    # The present state

    def module_of(self, context: int) -> str:
        """The module at work: in backward, the one whose forward made the node."""
        if context >= 0:
            return self.contexts[context]
        return self.modules[-1] if self.modules else ""

    def line(self) -> str:
        """The script's line at work; on PyTorch's own threads, the one that the main thread waits in."""
        return self.place().line

    def place(self) -> Place:
        """The script's line at work, and what called it."""
        found = self.lines.find(sys._getframe().f_back)
        if found.line:
            return found
        return Place(self._held.line or self.lines.last, found.stack + self._held.stack, found.phase or self._region)

    def enter(self, phase: str) -> None:
        """From here on, this phase runs, unless a function that is at work says more."""
        self._base = phase
        self._settle()

    def at(self, place: Place) -> None:
        """A block is asked for here: functions on its stack may say what for."""
        if place.phase != self._region and not self._is_marking:
            self._leave(self._region)
            self._region = place.phase
            self._settle()

    @contextmanager
    def within(self, region: str) -> Iterator[None]:
        """What runs inside is this phase, unless a function further out says more, or it runs beside the script."""
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
        """A function that evaluated has ended, or what it evaluated was saved: the evaluation is over."""
        if region in ("evaluation", "saving") and self._base == "evaluation":
            self._base = "other"

    def _settle(self) -> None:
        phase = self._base if self._base in _PLAIN else self._region or self._base
        if phase != self.phase:
            self.phase = phase
            self.category = _BY_PHASE.get(phase, Category.OTHER)
            self._is_marking = True
            self.sink.mark("phase", phase)
            self._is_marking = False
            if self.observer:
                self.observer.phase_begins(phase)

    # Modules

    def module_starts(self, module: Any, arguments: tuple[Any, ...]) -> None:
        """A module's forward begins; the outermost one begins a forward phase, and maybe a step."""
        if self.host:
            self.host.tick()
        if not self.modules and self._base != "backward":
            self._root_starts(module, (*arguments, *self.keywords.values()))
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
        """A module's forward is over."""
        if self.modules:
            self.modules.pop()
        self.sink.at_module(self._context(self.modules[-1]) if self.modules else 0)
        if not self.modules:
            self.keywords = {}
            self._mark_caches((output,))
            if self.observer:
                self.observer.root_ends(output)

    def _root_starts(self, module: Any, given: tuple[Any, ...]) -> None:
        import torch

        self.at(self.place())
        infers = not torch.is_grad_enabled()
        # Without gradients, or (as people forget `no_grad`) in the evaluation mode of a module that also trains.
        evaluates = not module.training and (infers or module in self._trained)
        self._ask_driver("evaluation" if infers else "training", module)
        if self.trains and (evaluates or (infers and self._region == "generation")):
            # Between the steps of a training: no step of its own.
            self.enter(self._base if self._base == "forward" else "evaluation")
        else:
            if module.training and not infers:
                self._trained.add(module)
            if self._stepped or (infers and self._base != "forward"):
                self._stepped = False
                self.step += 1
                self.sink.mark("step", str(self.step))
            self._stepped |= infers
            self.enter("forward")
        if self._is_new(module):
            self.mark_model(module)
        self.mark(Category.INPUTS, _tensors(given), only=Category.OTHER)
        self._mark_caches(given)

    def _name(self, root: Any) -> None:
        prefix = f"{self.modules[-1]}." if self.modules and self.modules[-1] else ""
        for path, module in root.named_modules():
            self._paths.setdefault(module, (prefix + path).rstrip("."))

    def _context(self, path: str) -> int:
        number = self._context_numbers.get(path)
        if number is None:
            number = self._context_numbers[path] = len(self.contexts)
            self.contexts.append(path)
        return number

    # Who drives it

    def _ask_driver(self, of: str, model: Any) -> None:
        """Once in training, and once before: what is at work on the stack, and what the model can do."""
        if of in self._asked_driver or "training" in self._asked_driver:
            return
        self._asked_driver.add(of)
        try:
            facts, whole = facts_of_driver(sys._getframe())
            self.training |= facts | facts_of_model(model)
        except (AttributeError, TypeError, RuntimeError, LookupError):
            return  # a library of another version: the advice is in plain words then
        if whole is not None:
            self._name(whole)

    def optimizer_made(self, optimizer: Any) -> None:
        """A script that makes an optimizer trains, with that one."""
        self.trains = True
        known = self.training.get("optimizers", "").split()
        if (name := name_of_optimizer(optimizer)) and name not in known:
            self.training["optimizers"] = " ".join([*known, name])

    # Backward and optimizers

    def backward_starts(self) -> None:
        """The autograd engine runs; its threads have no Python frames of the script, so the line is held."""
        if not self._backward_depth:
            self._held = self.place()
            self.at(self._held)
            self.sink.held_line = self._held.line
            self.enter("backward")
        self._backward_depth += 1

    def backward_ends(self) -> None:
        """The engine is done: what now hangs on the parameters are gradients."""
        self._backward_depth -= 1
        if not self._backward_depth:
            if not self._frugal:
                self.mark_gradients(self._parameters())
            self._held = NOWHERE
            if self._stepped_within and self.observer:
                self.observer.optimizer_ends()
            self._stepped_within = False
            # Backward in the closure of an optimizer's step: the step itself follows.
            self.enter("optimizer" if self.stepping else "other")

    def step_starts(self, optimizer: Any) -> None:
        """An optimizer steps, perhaps inside backward."""
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
        """What the optimizer keeps are its states."""
        self._stepped, self.stepping = True, False
        if self._is_new(optimizer):
            self.mark(Category.OPTIMIZER_STATES, _tensors(optimizer.state.values()))
        self.enter("backward" if self._backward_depth else "other")
        self._stepped_within = self._backward_depth > 0
        if self.observer and not self._stepped_within:
            self.observer.optimizer_ends()

    def _is_new(self, thing: Any) -> bool:
        """Whether it is worth looking at: always, unless frugal and seen before."""
        if not self._frugal:
            return True
        known = thing in self._seen
        self._seen.add(thing)
        return not known

    # Marks on blocks

    def mark(self, category: Category, tensors: Iterable[Any], *, only: Category | None = None) -> None:
        """These tensors' blocks belong to the category (with `only`: if they belonged to that one so far)."""
        own = [part for tensor in tensors if tensor is not None for part in _parts(tensor)]
        found = [address_of(t) for t in own if t.is_cuda and _has_storage(t)]
        if found:
            self.sink.categorise(category, found, only)
        if self.host and only is None:
            self.host.categorise(category, [address_of(t) for t in own if t.is_cpu and _has_storage(t)])

    def mark_model(self, module: Any) -> None:
        """A module's parameters and buffers are the model."""
        parameters = list(module.parameters())
        self._remember(parameters)
        self.mark(Category.PARAMETERS, parameters)
        self.mark(Category.PARAMETERS, module.buffers(), only=Category.OTHER)

    def mark_gradients(self, parameters: Iterable[Any]) -> None:
        """What hangs on these parameters are gradients."""
        self.mark(Category.GRADIENTS, [p.grad for p in parameters])

    def _remember(self, parameters: Iterable[Any]) -> None:
        for parameter in parameters:
            if id(parameter) not in self._known:
                self._known[id(parameter)] = weakref.ref(parameter)

    def _parameters(self) -> list[Any]:
        found = [reference() for reference in self._known.values()]
        return [parameter for parameter in found if parameter is not None]

    def finish(self) -> None:
        """At the end, or where the script died: what is still undecided."""
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
    """The plain tensors that hold a tensor's bytes.

    A sharded tensor keeps some on this rank, a sparse one indices and values, and a subclass that wraps others
    (quantised and float8 weights, jagged tensors) says which: it has a storage of its own, of which nothing may be asked.
    """
    torch = sys.modules["torch"]
    tensor = getattr(tensor, "_local_tensor", tensor)
    if hasattr(tensor, "__tensor_flatten__"):
        names = tensor.__tensor_flatten__()[0]
        return [part for name in names for part in _parts(getattr(tensor, name))]
    if isinstance(tensor, torch.Tensor) and tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return [tensor]


def _has_storage(tensor: Any) -> bool:
    """Tensors that torch.func wraps for a transform, and subclasses that only wrap others, have none to be asked for."""
    torch = sys.modules["torch"]
    if tensor.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) or _has_address(tensor)


def address_of(tensor: Any) -> int:
    """Where the storage begins. Asking for the storage itself would leave a reference to it, and autograd adds gradients in
    place only where it holds the one reference."""
    return int(tensor.data_ptr() - tensor.storage_offset() * tensor.element_size())


def _has_address(tensor: Any) -> bool:
    """Whether a subclass has bytes of its own."""
    try:
        address_of(tensor)
    except (RuntimeError, NotImplementedError, ValueError):  # the last of a lazy module's, before its first call
        return False
    return True


def _tensors(values: Iterable[Any], depth: int = 4) -> list[Any]:
    """The tensors in nested containers and dataclass-like mappings."""
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
