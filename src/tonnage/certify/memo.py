"""Runs what is new and replays what has been seen: calls of models, backwards, optimizers' steps and what works on gradients.

The script itself runs, with its loops, counters, data and everything between those calls. A call that has been seen with tensors of the
same shapes, in the same state (gradients there or not, autocast, training or evaluation), is not run again: the blocks that it took and
dropped are written into the program as they were, and tensors of the same layout are returned. Gradients of a replayed backward have
blocks but no tensors, until something that is run needs them.
"""

import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from math import prod
from types import MethodType
from typing import Any

from tonnage.certify.outputs import CannotRepeat, Output, TensorLayout, tensors_within
from tonnage.certify.program import (
    ALLOWED,
    EMPTY,
    OUTSIDE,
    TEMPLATE_EMPTY,
    TEMPLATE_GIVE,
    TEMPLATE_GIVE_ARGUMENT,
    TEMPLATE_TAKE,
    Owner,
    Part,
    Program,
    Template,
)
from tonnage.recording.records import Allocation
from tonnage.script.attribution import address_of
from tonnage.script.lines import Place
from tonnage.virtual.device import _WITHOUT_KERNELS

_FEW = 16
_APART = 4096  # addresses need only differ
_TRUSTED_RUN = 3  # what a call leaves behind even then is its own
Key = tuple[Any, ...]
Undo = Callable[[], None]


@dataclass
class Call:
    """One that has been run, and can be replayed."""

    template: Template
    output: Output | None = None
    loose_at_once: list[int] = field(default_factory=list)  # slots that were dropped right after it, by no other call
    loose: list[int] = field(default_factory=list)  # and those that were dropped later
    gradients: list[tuple[Any, int]] = field(default_factory=list)  # parameters (weakly) and their gradients' slots
    left: list[int] = field(default_factory=list)  # slots that nobody outside holds, once it is over
    drop: Template | None = None
    own_takes: int = -1  # blocks that the script itself asked for until the next part

    def dropping(self, program: Program) -> Template:
        """What drops all that the call left: a graph without a backward, or gradients that are set to None."""
        if self.drop is None:
            self.drop = program.new_template(f"drop {self.template.name}")
            for slot in self.left:
                self.drop.events.extend((TEMPLATE_GIVE_ARGUMENT, 0, slot, 0))
        return self.drop


@dataclass
class Pending:
    """A forward whose backward has not come yet."""

    call: Call | None
    instance: int
    is_real: bool
    done: bool = False


class Memo:
    """Between `install` and its undoing, events of the virtual GPU are written into the program."""

    def __init__(self, session: Any, program: Program, *, replays: bool = True, most_epochs: int = 0, most_steps: int = 0) -> None:
        self.program = program
        self.replays = replays
        self.most_epochs, self.most_steps = most_epochs, most_steps
        self.step = self.micro_batch = 0
        self.replayed_parts = self.differing_parts = 0
        self.notes: set[str] = set()
        self.on_step: Callable[[], None] | None = None
        self._session, self._device, self._torch = session, session.device, session.torch
        self._drain = getattr(session.device, "drain", lambda: None)
        self._owners: dict[int, Owner] = {}
        self._address = 0
        self._calls: dict[Key, Call] = {}
        self._by_instance: dict[int, Call] = {}  # of calls that were run, while their blocks live
        self._template: Template | None = None
        self._instance = -1
        self._arguments: list[int] = []
        self._deferred: list[Owner] = []
        self._binding: list[Owner] = []
        self._muted = 0
        self._pending: list[Pending] = []
        self._replaying: Call | None = None
        self._last_forward: dict[int, int] = {}
        self._stepped = True
        self._handling_gradients = 0
        self._virtual_gradients: list[tuple[int, Call]] = []
        self._materialises = False  # the script handles gradients by itself
        self._parameters: dict[int, list[Any]] = {}
        self._loose_later: list[Owner] = []
        self._takes = 0
        self._present: Call | None = None  # the forward of the present part
        self._present_is_real = True
        self._fresh: list[tuple[Key, int, Call]] = []  # what was run in the present part
        self._runs: dict[Key, int] = {}
        self._outside = -1
        self._epochs: dict[int, int] = {}
        self._itemsize = {str(dtype).removeprefix("torch."): dtype.itemsize for dtype in _dtypes(self._torch)}

    def install(self) -> Undo:
        """Take the place of what is replayed."""
        device = self._device
        device.allocated, device.freed = self._allocated, self._freed
        undo = [
            self._wrap_call(), self._wrap_engine(), self._wrap_optimizers(), self._wrap_gradients(), self._wrap_loaders(),
            self._wrap_limits(),
        ]  # fmt: skip

        def restore() -> None:
            for each in reversed(undo):
                each()
            del device.allocated, device.freed

        return restore

    # -- events of the card

    def take_over(self) -> None:
        """On a CPU build, hand out addresses in place of the card's allocator, before the card is opened: nobody asks it."""
        device = self._device
        if hasattr(device, "allocator"):
            device.malloc, device.free, device.record_stream = self._malloc, self._free, lambda address, stream: None

    def _malloc(
        self, size: int, index: int, stream: int, operator: str, context: int, serial: int, shape: Any, dtype: str
    ) -> int:
        self._address += _APART
        if not self._muted:
            device = self._device
            line = "" if self._binding else device.attribution.place().line
            self._take(self._address, size, stream, line)
            device.cards.add(index)
            if device._no_kernel_yet and operator not in _WITHOUT_KERNELS:
                device._no_kernel_yet = False
                device.use("kernels")
        return self._address

    def _free(self, address: int, serial: int) -> None:
        owner = self._owners.pop(address, None)
        if owner is not None:
            self._drop(owner)

    def _take(self, address: int, size: int, stream: int, line: str) -> None:
        if self._binding:
            self._owners[address] = self._binding.pop(0)
        elif self._template is not None:
            slot = self._template.slots
            self._template.lines.append(self.program.line(line))
            self._template.events.extend((TEMPLATE_TAKE, slot, size, stream))
            self._owners[address] = (self._instance, slot)
        else:
            self._takes += 1
            self._owners[address] = self.program.take(size, stream, line)

    def _allocated(
        self, address: int, size: int, block_size: int, stream: int, operator: str, module: str, serial: int, shape: Any,
        dtype: str, place: Place,
    ) -> Allocation:  # fmt: skip
        device, who = self._device, self._device.attribution
        device.sequence += 1
        allocation = Allocation(
            0, address, size, block_size, stream, device.sequence, None, who.category, operator, module, who.phase, who.step,
            place.line, place.stack, shape, dtype,
        )  # fmt: skip
        device.live[address] = allocation
        device.serials[address] = serial
        if self._muted:
            return allocation
        if shape is not None and dtype in self._itemsize and size == block_size:
            size = self._requested(size, shape, dtype)
        self._take(address, size, stream, place.line)
        return allocation

    def _requested(self, block_bytes: int, shape: tuple[int, ...], dtype: str) -> int:
        """What was asked for: torch's own allocator tells the block, which may be larger by what was not worth splitting off."""
        wanted = prod(shape) * self._itemsize[dtype]
        return wanted if 0 <= block_bytes - wanted <= 2**20 + 512 and wanted else block_bytes

    def _freed(self, address: int, serial: int) -> Allocation | None:
        device = self._device
        allocation = device.live.pop(address, None)
        device.serials.pop(address, None)
        owner = self._owners.pop(address, None)
        if owner is not None:
            device.sequence += 1
            self._drop(owner)
        return allocation

    def _drop(self, owner: Owner) -> None:
        if self._template is None:
            self._give(owner)
        elif owner[0] == self._instance:
            self._template.events.extend((TEMPLATE_GIVE, owner[1], 0, 0))
        elif owner[0] in self._arguments:
            self._template.events.extend((TEMPLATE_GIVE_ARGUMENT, self._arguments.index(owner[0]), owner[1], 0))
        else:
            self._template.repeats &= owner[0] < 0  # one of the script's own is dropped by the script in a replay, too
            self._deferred.append(owner)

    def _give(self, owner: Owner) -> None:
        """The script dropped a block. Of a call that was run it is noted, so that a replay drops it, too."""
        self.program.give(owner)
        call = self._by_instance.get(owner[0])
        if call is None:
            return
        slot = owner[1]
        if any(one == slot for _, one in call.gradients):
            self._materialises |= not self._handling_gradients
        elif call.output is None or all(layout.slot != slot for layout in call.output.layouts):
            (call.loose if self._takes else call.loose_at_once).append(slot)

    # -- one call

    def _start(self, name: str, arguments: list[int]) -> int:
        self._drain()
        self._template = self.program.new_template(name)
        self._instance = self.program.new_instance()
        self._arguments, self._deferred = arguments, []
        return self._instance

    def _stop(self) -> Call:
        """The call that was being written down is over."""
        self._drain()
        template, self._template = self._template, None
        assert template is not None
        self.program.call(template, self._instance, self._arguments)
        for owner in self._deferred:
            self._give(owner)
        call = Call(template)
        self._by_instance[self._instance] = call
        while len(self._by_instance) > 64:
            del self._by_instance[next(iter(self._by_instance))]
        dropped = {template.events[at + 1] for at in range(0, len(template.events), 4) if template.events[at] == TEMPLATE_GIVE}
        call.left = [slot for slot in range(template.slots) if slot not in dropped]
        return call

    @contextmanager
    def _written_down(self, name: str, arguments: list[int], found: list[Call]):  # type: ignore[no-untyped-def]
        self._start(name, arguments)
        try:
            yield
        finally:
            found.append(self._stop())

    def _layout_of(self, instance: int, arguments: list[Any]) -> Callable[[Any], TensorLayout]:
        def layout(tensor: Any) -> TensorLayout:
            for number, argument in enumerate(arguments):
                if argument is tensor:
                    return TensorLayout(-1, argument=number)
            owner = self._owners.get(address_of(tensor)) if tensor.is_cuda and tensor.numel() else None
            if owner is None:
                return TensorLayout(-1, kept=tensor)
            if owner[0] != instance:
                raise CannotRepeat("its result lies in memory that was there before")
            return TensorLayout(
                owner[1], tensor.untyped_storage().nbytes(), tuple(tensor.shape), tensor.stride(), tensor.storage_offset(),
                tensor.dtype, tensor.requires_grad,
                tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size(),
                self._values(tensor),
            )  # fmt: skip

        return layout

    def _values(self, tensor: Any) -> Any:
        if tensor.numel() > _FEW or not self._session.is_known(tensor):
            return None
        with self._unseen():
            return tensor.detach().cpu()

    @contextmanager
    def _unseen(self):  # type: ignore[no-untyped-def]
        """What is done in here is not the script's."""
        self._drain()
        self._muted += 1
        try:
            yield
        finally:
            self._drain()
            self._muted -= 1

    def _tensors(self, call: Call, instance: int, arguments: list[Any]) -> list[Any]:
        """New tensors in the blocks of a call that is replayed."""
        torch, layouts = self._torch, call.output.layouts if call.output else []
        storages: dict[int, Any] = {}
        shared = Counter(one.slot for one in layouts)
        found: list[Any] = []
        self._drain()
        for one in layouts:
            if one.slot < 0:
                found.append(one.kept if one.argument < 0 else arguments[one.argument])
                continue
            if one.is_whole and shared[one.slot] == 1:
                self._binding.append((instance, one.slot))
                found.append(torch.empty(one.shape, dtype=one.dtype, device="cuda"))
                self._drain()
                self._know(found[-1], one.values)
                continue
            if one.slot not in storages:
                self._binding.append((instance, one.slot))
                whole = torch.empty(one.block_bytes, dtype=torch.uint8, device="cuda")
                self._drain()
                storages[one.slot] = whole.untyped_storage()
                del whole
            tensor = torch.empty(0, dtype=one.dtype, device="cuda")
            found.append(tensor.set_(storages[one.slot], one.offset, one.shape, one.stride))
            self._know(tensor, one.values)
        return found

    def _know(self, tensor: Any, values: Any) -> None:
        if values is not None:
            with self._unseen():
                tensor.copy_(values)

    def _replay(self, call: Call, arguments: list[int]) -> int:
        instance = self.program.new_instance()
        self.program.call(call.template, instance, arguments)
        for slot in call.loose_at_once:
            self.program.give((instance, slot))
        self._loose_later += [(instance, slot) for slot in call.loose]
        return instance

    # -- parts of the training

    def _begin(self, part: Part) -> None:
        self._drain()
        self._end_part()
        self._distrust_first_runs()
        for owner in self._loose_later:
            self.program.give(owner)
        self._loose_later = []
        self.program.begin(part)
        outside = sum(self._device.overhead_parts.values()) if self._present_is_real else self._outside
        if outside != self._outside:
            self._outside = outside
            self.program.operations.extend((OUTSIDE, outside))

    def _end_part(self) -> None:
        """Hold what the script itself asked for against what it asked for when the call was run."""
        call, takes = self._present, self._takes
        self._present, self._takes = None, 0
        if call is None:
            return
        if self._present_is_real or call.own_takes < 0:
            call.own_takes = takes
        elif call.own_takes != takes:
            self.differing_parts += 1

    def _distrust_first_runs(self) -> None:
        """Forget a call that left blocks which nobody returned: libraries take their workspaces once, in whatever runs first."""
        fresh, self._fresh = self._fresh, []
        if not fresh:
            return
        held = set(self._owners.values())
        for _, instance, call in fresh:
            known = {layout.slot for layout in call.output.layouts} if call.output else set()
            known |= {slot for _, slot in call.gradients}
            if any((instance, slot) in held for slot in range(call.template.slots) if slot not in known):
                break
        else:
            return
        for key, _, _ in fresh:
            self._runs[key] = self._runs.get(key, 0) + 1
            if self._runs[key] < _TRUSTED_RUN:
                self._calls.pop(key, None)

    def _root_begins(self, trains: bool, shape: tuple[int, ...], replayed: bool) -> None:
        if trains:
            self.micro_batch = 1 if self._stepped else self.micro_batch + 1
            self.step += self._stepped
            self._stepped = False
            if self.most_steps and self.step > self.most_steps:
                raise _stopped()
        kind = "step" if trains else "evaluation"
        part = Part(kind, self.step, self.micro_batch, shape, replayed)
        if self.program.parts[-1].kind == "data":
            self.program.parts[-1] = part
        else:
            self._begin(part)
        self.replayed_parts += replayed
        if self.on_step is not None:
            self.on_step()

    # -- models

    def _wrap_call(self) -> Undo:
        from tonnage.script import hooks

        torch = self._torch
        plain = torch.nn.Module._call_impl

        def call(module: Any, *arguments: Any, **keywords: Any) -> Any:
            if self._template is not None or self._device.attribution.modules or torch.compiler.is_compiling() or hooks._is_traced():
                return plain(module, *arguments, **keywords)
            return self._forward(plain, module, arguments, keywords)

        call.__name__ = plain.__name__
        hooks._set_call(call)
        return lambda: hooks._set_call(plain)

    def _forward(self, plain: Any, module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        torch = self._torch
        parameters = self._parameters.get(id(module))
        if parameters is None:
            parameters = self._parameters[id(module)] = [one for one in module.parameters() if one.requires_grad]
            weakref.finalize(module, self._parameters.pop, id(module), None)
        if not parameters and not any(one.is_cuda for one in module.buffers()):
            return plain(module, *arguments, **keywords)  # a loss function: part of the script
        trains = torch.is_grad_enabled() and bool(parameters)
        key, given = self._key(module, arguments, keywords, parameters)
        known = self._calls.get(key) if key is not None and self.replays else None
        replayed = known is not None and known.template.repeats
        self._root_begins(trains, _batch_shape(given, keywords), replayed)
        previous = self._last_forward.get(id(module))
        before = [] if previous is None else [previous]
        if replayed:
            assert known is not None and known.output is not None
            instance = self._replay(known, before)
            self._last_forward[id(module)] = instance
            self._present, self._present_is_real = known, False
            if not trains:
                return known.output.build(self._tensors(known, instance, given))
            pending = Pending(known, instance, is_real=False)
            self._pending.append(pending)
            function = _replayed_function(torch)
            return known.output.build(list(function.apply(self._anchor(), self, pending, given)))
        if trains:
            self._materialise()
        return self._run_forward(plain, module, arguments, keywords, key, given, before, trains)

    def _run_forward(
        self, plain: Any, module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], key: Key | None, given: list[Any],
        before: list[int], trains: bool,
    ) -> Any:  # fmt: skip
        instance = self._start("forward" if trains else "evaluation", before)
        try:
            output = plain(module, *arguments, **keywords)
        finally:
            call = self._stop()
        self._last_forward[id(module)] = instance
        self._present, self._present_is_real = call, True
        try:
            call.output = Output(output, self._layout_of(instance, given), self._torch.Tensor)
        except CannotRepeat as reason:
            self.notes.add(f"{type(module).__name__} is run at every step: {reason}")
            key = None
        if call.output is not None:
            held = {layout.slot for layout in call.output.layouts}
            call.left = [slot for slot in call.left if slot not in held]
        if key is not None:
            self._calls[key] = call
            self._fresh.append((key, instance, call))
        if trains:
            pending = Pending(call if key is not None else None, instance, is_real=True)
            self._pending.append(pending)
            self._watch_backward(output)
        return output

    def _key(
        self, module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], parameters: list[Any]
    ) -> tuple[Key | None, list[Any]]:
        """What decides what a call does; None where it cannot be told. And its tensors."""
        torch, given = self._torch, list[Any]()
        try:
            signature = tuple(self._signature("", one, given) for one in arguments)
            signature += tuple((name, self._signature(name, one, given)) for name, one in keywords.items())
        except CannotRepeat as reason:
            self.notes.add(f"{type(module).__name__} is run at every step: {reason}")
            return None, given
        grad = torch.is_grad_enabled()
        if grad and any(tensor.requires_grad for tensor in given):
            self.notes.add(f"{type(module).__name__} is run at every step: gradients flow into its arguments")
            return None, given
        autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        pending = tuple(one.call.template.number if one.call else -1 for one in self._pending) if grad else ()
        state = (grad, torch.is_inference_mode_enabled(), autocast, module.training, grad and self._has_gradients(parameters))
        return ("forward", id(module), state, pending, signature), given

    def _signature(self, name: str, value: Any, given: list[Any], depth: int = 4) -> Any:
        if isinstance(value, self._torch.Tensor):
            given.append(value)
            whole = "mask" in name and self._is_whole(value)
            return tuple(value.shape), value.dtype, value.is_cuda, value.requires_grad, whole
        if value is None or isinstance(value, (int, float, str, bool, self._torch.dtype, self._torch.device)):
            return value
        if isinstance(value, (list, tuple)) and depth:
            return tuple(self._signature(name, one, given, depth - 1) for one in value)
        if isinstance(value, dict) and depth:
            return tuple((key, self._signature(str(key), one, given, depth - 1)) for key, one in value.items())
        held: list[Any] = []
        tensors_within(value, self._torch.Tensor, held, 4)
        if held:
            raise CannotRepeat(f"a {type(value).__name__} among its arguments holds tensors")
        return type(value).__name__

    def _is_whole(self, mask: Any) -> bool | None:
        """Whether a mask masks nothing: models look, and take another way."""
        if mask.is_cuda and not self._session.is_known(mask):
            return None
        with self._unseen():
            return bool((mask != 0).all())

    def _anchor(self) -> Any:
        if not hasattr(self, "_anchor_tensor"):
            self._anchor_tensor = self._torch.zeros((), requires_grad=True)
        return self._anchor_tensor

    # -- backward

    def _watch_backward(self, output: Any) -> None:
        """Hear where a backward reaches what the model returned."""
        found: list[Any] = []
        tensors_within(output, self._torch.Tensor, found, 4)
        for node in {tensor.grad_fn for tensor in found if tensor.grad_fn is not None}:
            node.register_prehook(self._reached)

    def _reached(self, *_: Any) -> None:
        waiting, self._waiting = getattr(self, "_waiting", None), None
        if waiting is not None:
            self._start("backward", waiting)

    def _wrap_engine(self) -> Undo:
        from torch.autograd import graph

        torch, plain = self._torch, graph._engine_run_backward

        def run_backward(*arguments: Any, **keywords: Any) -> Any:
            pending = [one for one in self._pending if not one.done]
            if self._template is not None or not pending:
                return plain(*arguments, **keywords)
            self._pending = []
            kinds = {one.is_real for one in pending}
            if len(kinds) > 1:
                raise Unfaithful("a backward goes through calls of which one is new and another was replayed")
            if kinds == {True}:
                return self._run_backward(plain, pending, arguments, keywords)
            key = self._backward_key(pending)
            self._replaying = self._calls.get(key)
            if self._replaying is None:
                raise Unfaithful("a backward of calls that were replayed has not been seen")
            self._replaying_arguments = [one.instance for one in pending]
            try:
                return plain(*arguments, **keywords)
            finally:
                for one in pending:
                    one.done = True

        graph._engine_run_backward = torch.autograd._engine_run_backward = run_backward

        def restore() -> None:
            graph._engine_run_backward = torch.autograd._engine_run_backward = plain

        return restore

    def _backward_key(self, pending: list[Pending]) -> Key:
        return "backward", tuple(one.call.template.number if one.call else -1 for one in pending)

    def _run_backward(self, plain: Any, pending: list[Pending], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        key = self._backward_key(pending)
        held = [one.instance for one in pending]
        self._waiting: list[int] | None = held
        call: Call | None = None
        try:
            result = plain(*arguments, **keywords)
        finally:
            self._waiting = None
            for one in pending:
                one.done = True
            if self._template is not None:
                call = self._stop()
        if call is None:
            return result
        instance = self._instance
        for parameters in self._parameters.values():
            for parameter in parameters:
                owner = self._owners.get(address_of(parameter.grad)) if parameter.grad is not None else None
                if owner is not None and owner[0] == instance and owner[1] in call.left:
                    if all(slot != owner[1] for _, slot in call.gradients):
                        call.gradients.append((weakref.ref(parameter), owner[1]))
        kept = {slot for _, slot in call.gradients}
        call.left = [slot for slot in call.left if slot in kept]
        if all(one.call is not None for one in pending):
            self._calls[key] = call
            self._fresh.append((key, instance, call))
        return result

    def replay_backward(self) -> None:
        """A backward has reached what a replayed call returned."""
        call, self._replaying = self._replaying, None
        if call is None:
            return
        instance = self._replay(call, self._replaying_arguments)
        if call.gradients:
            self._virtual_gradients.append((instance, call))
            if self._materialises:
                self._materialise()

    def dropped(self, pending: Pending) -> None:
        """The graph of a replayed call is gone; without a backward it drops what it held."""
        if not pending.done and pending.call is not None:
            pending.done = True
            self.program.call(pending.call.dropping(self.program), self.program.new_instance(), [pending.instance])

    # -- gradients

    def _has_gradients(self, parameters: list[Any]) -> bool:
        return bool(self._virtual_gradients) or any(one.grad is not None for one in parameters)

    def _materialise(self) -> None:
        """Give parameters their gradients: tensors in the blocks that a replayed backward took."""
        virtual, self._virtual_gradients = self._virtual_gradients, []
        torch = self._torch
        for instance, call in virtual:
            for reference, slot in call.gradients:
                parameter = reference()
                if parameter is None:
                    continue
                self._drain()
                self._binding.append((instance, slot))
                with torch.no_grad():
                    parameter.grad = torch.empty_strided(
                        parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device
                    )
                self._drain()
                self._binding.clear()

    def _memoised(self, key: Key, name: str, run: Callable[[], Any]) -> Any:
        """Run or replay something that works on gradients."""
        known = self._calls.get(key) if self.replays else None
        if known is not None and known.template.repeats and known.output is not None:
            instance = self._replay(known, [])
            return known.output.build(self._tensors(known, instance, []))
        self._materialise()
        self._handling_gradients += 1
        found: list[Call] = []
        try:
            with self._written_down(name, [], found):
                result = run()
        finally:
            self._handling_gradients -= 1
        try:
            found[0].output = Output(result, self._layout_of(self._instance, []), self._torch.Tensor)
            self._calls[key] = found[0]
        except CannotRepeat:
            pass
        return result

    def _wrap_optimizers(self) -> Undo:
        from torch.optim import optimizer as optim

        memo, plain_init, plain_zero = self, optim.Optimizer.__init__, optim.Optimizer.zero_grad
        plain_module_zero = self._torch.nn.Module.zero_grad

        @wraps(plain_init)
        def make(optimizer: Any, *arguments: Any, **keywords: Any) -> None:
            plain_init(optimizer, *arguments, **keywords)
            step = type(optimizer).step

            @wraps(step)
            def stepping(optimizer: Any, *given: Any, **named: Any) -> Any:
                return memo._step(optimizer, lambda: step(optimizer, *given, **named), repeats=not given and not named)

            optimizer.step = MethodType(stepping, optimizer)

        def zero(plain: Any) -> Any:
            @wraps(plain)
            def zero_grad(owner: Any, set_to_none: bool = True) -> Any:
                if memo._template is not None:
                    return plain(owner, set_to_none)
                if set_to_none:
                    for instance, call in memo._virtual_gradients:
                        memo.program.call(call.dropping(memo.program), memo.program.new_instance(), [instance])
                    memo._virtual_gradients = []
                memo._handling_gradients += 1
                try:
                    return plain(owner, set_to_none)
                finally:
                    memo._drain()
                    memo._handling_gradients -= 1

            return zero_grad

        optim.Optimizer.__init__ = make
        optim.Optimizer.zero_grad = zero(plain_zero)
        self._torch.nn.Module.zero_grad = zero(plain_module_zero)

        def restore() -> None:
            optim.Optimizer.__init__, optim.Optimizer.zero_grad = plain_init, plain_zero
            self._torch.nn.Module.zero_grad = plain_module_zero

        return restore

    def _step(self, optimizer: Any, run: Callable[[], Any], repeats: bool) -> Any:
        if self._template is not None:
            return run()
        if not repeats:
            self._materialise()
            result = run()
        else:
            key = ("step", id(optimizer), bool(optimizer.state), len(optimizer.param_groups))
            result = self._memoised(key, "optimizer", run)
        self._stepped = True
        self._begin(Part("between", self.step))
        return result

    def _wrap_gradients(self) -> Undo:
        torch = self._torch
        clipping = torch.nn.utils.clip_grad
        undo: list[Undo] = []

        def replace(owners: list[Any], name: str, make: Callable[[Any], Any]) -> None:
            plain = getattr(owners[0], name)
            for owner in owners:
                setattr(owner, name, make(plain))
            undo.append(lambda: [setattr(owner, name, plain) for owner in owners])  # type: ignore[func-returns-value]

        def clip(plain: Any) -> Any:
            @wraps(plain)
            def clipped(parameters: Any, *arguments: Any, **keywords: Any) -> Any:
                if self._template is not None:
                    return plain(parameters, *arguments, **keywords)
                present = any(self._has_gradients(some) for some in self._parameters.values())
                key = ("clip", plain.__name__, present, len(arguments), tuple(keywords))
                return self._memoised(key, "clipping", lambda: plain(parameters, *arguments, **keywords))

            return clipped

        for name in ("clip_grad_norm_", "clip_grad_value_"):
            replace([clipping, torch.nn.utils], name, clip)

        def unscale(plain: Any) -> Any:
            @wraps(plain)
            def unscaled(scaler: Any, optimizer: Any, *arguments: Any) -> Any:
                key = ("unscale", id(optimizer))
                return self._memoised(key, "unscaling", lambda: plain(scaler, optimizer, *arguments))

            return unscaled

        replace([torch.amp.GradScaler], "_unscale_grads_", unscale)
        return lambda: [each() for each in undo] and None  # type: ignore[func-returns-value]

    # -- data, and limits

    def _wrap_loaders(self) -> Undo:
        from torch.utils.data import dataloader

        memo = self
        plain_next, plain_iter = dataloader._BaseDataLoaderIter.__next__, dataloader.DataLoader.__iter__

        def following(iterator: Any) -> Any:
            if memo._template is None and memo.program.parts[-1].kind != "data":
                memo._begin(Part("data", memo.step))
            return plain_next(iterator)

        def beginning(loader: Any) -> Any:
            if memo.most_epochs and loader.dataset is not None:
                passes = memo._epochs[id(loader)] = memo._epochs.get(id(loader), 0) + 1
                if passes > memo.most_epochs and memo._torch.is_grad_enabled():
                    raise _stopped()
            return plain_iter(loader)

        dataloader._BaseDataLoaderIter.__next__ = following
        dataloader.DataLoader.__iter__ = beginning

        def restore() -> None:
            dataloader._BaseDataLoaderIter.__next__, dataloader.DataLoader.__iter__ = plain_next, plain_iter

        return restore

    def _wrap_limits(self) -> Undo:
        """`set_per_process_memory_fraction` and `empty_cache` are for whoever lives through the program."""
        cuda, program = self._torch.cuda, self.program
        plain = cuda.set_per_process_memory_fraction, cuda.empty_cache

        def limit(fraction: float, device: Any = None) -> None:
            allowed = int(fraction * self._device.gpu.memory_bytes) if fraction < 1 else -1
            program.operations.extend((ALLOWED, allowed))

        def empty() -> None:
            self._drain()
            if self._template is None:
                program.operations.append(EMPTY)
            else:
                self._template.events.extend((TEMPLATE_EMPTY, 0, 0, 0))
            plain[1]()

        for module in (cuda, cuda.memory):
            module.set_per_process_memory_fraction, module.empty_cache = limit, empty

        def restore() -> None:
            for module in (cuda, cuda.memory):
                module.set_per_process_memory_fraction, module.empty_cache = plain

        return restore


class Unfaithful(Exception):
    """What was replayed cannot go on as the script does: all of it must be run."""


class _Graph:
    """Lives as long as the graph of a replayed call."""

    def __init__(self, memo: Memo, pending: Pending) -> None:
        self.memo, self.pending = memo, pending

    def __del__(self) -> None:
        self.memo.dropped(self.pending)


_functions: dict[int, Any] = {}


def _replayed_function(torch: Any) -> Any:
    """The node of autograd that stands for a whole model."""
    if id(torch) in _functions:
        return _functions[id(torch)]

    class Replayed(torch.autograd.Function):  # type: ignore[misc, name-defined]
        @staticmethod
        def forward(ctx: Any, anchor: Any, memo: Memo, pending: Pending, given: list[Any]) -> Any:
            assert pending.call is not None and pending.call.output is not None
            ctx.graph = _Graph(memo, pending)
            tensors = memo._tensors(pending.call, pending.instance, given)
            layouts = pending.call.output.layouts
            ctx.mark_non_differentiable(*(t for t, one in zip(tensors, layouts, strict=True) if not one.differentiable))
            ctx.set_materialize_grads(False)
            return tuple(tensors)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            ctx.graph.memo.replay_backward()
            ctx.graph.pending.done = True
            return None, None, None, None

    _functions[id(torch)] = Replayed
    return Replayed


def _dtypes(torch: Any) -> list[Any]:
    return [value for value in vars(torch).values() if isinstance(value, torch.dtype)]


def _batch_shape(given: list[Any], keywords: dict[str, Any]) -> tuple[int, ...]:
    first = keywords.get("input_ids", given[0] if given else None)
    return tuple(first.shape) if hasattr(first, "shape") else ()


def _stopped() -> BaseException:
    from tonnage.virtual.going_on import Stopped

    return Stopped()
