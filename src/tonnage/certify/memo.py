"""Run what is new and replay what has been seen: model calls, backwards, optimizer steps and gradient operations.

The script itself runs, with its loops, counters, data and everything between those calls. A call that was seen with
tensors of the same shapes, in the same state (gradients present, autocast, training or evaluation), is not run
again: its block events are repeated in the program, and tensors of the same layout are returned.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial, wraps
from types import MethodType
from typing import Any

from tonnage.certify.events import Events
from tonnage.certify.program import (
    CannotRepeat,
    Key,
    Op,
    PendingBackward,
    ProgramPart,
    RecordedCall,
    ResultTree,
    TemplateOp,
    Unfaithful,
    tensors_within,
)
from tonnage.script.attribution import address_of
from tonnage.virtual.cuda.patches import Patches
from tonnage.virtual.going_on import Stopped


class Memo(Events):
    """Writes events of the virtual GPU into the program from `install` until its patches are undone."""

    def install(self, patches: Patches) -> None:
        """Patch what is replayed: each function is passed, with its arguments, to the method that stands for it."""
        from torch.autograd import graph
        from torch.optim import Optimizer
        from torch.utils.data import dataloader

        from tonnage.script import hooks

        device, nn, cuda = self._device, self._torch.nn, self._torch.cuda
        device.allocated, device.freed = self._allocated, self._freed
        patches.on_undo(partial(delattr, device, "allocated"))
        patches.on_undo(partial(delattr, device, "freed"))
        patches.on_undo(partial(hooks._set_call, nn.Module._call_impl))
        self._is_traced = hooks._is_traced
        hooks._set_call(_around(nn.Module._call_impl, self._call))

        def patch(owners: Sequence[Any], name: str, around: Callable[..., Any]) -> None:
            called = _around(getattr(owners[0], name), around)
            for owner in owners:
                patches.set(owner, name, called)

        patch((graph, self._torch.autograd), "_engine_run_backward", self._backward)
        patch([Optimizer], "__init__", self._make_optimizer)
        patch([Optimizer], "zero_grad", self._zero_grad)
        patch([nn.Module], "zero_grad", self._zero_grad)
        patch((nn.utils.clip_grad, nn.utils), "clip_grad_norm_", self._clip)
        patch((nn.utils.clip_grad, nn.utils), "clip_grad_value_", self._clip)
        patch([self._torch.amp.GradScaler], "_unscale_grads_", self._unscale)
        patch([dataloader._BaseDataLoaderIter], "__next__", self._next_batch)
        patch([dataloader.DataLoader], "__iter__", self._begin_epoch)
        patch((cuda, cuda.memory), "set_per_process_memory_fraction", self._limit)
        patch((cuda, cuda.memory), "empty_cache", self._empty)

    # -- gradients, and the optimizer

    def _has_gradients(self, parameters: list[Any]) -> bool:
        return bool(self._virtual_gradients) or any(one.grad is not None for one in parameters)

    def _materialise(self) -> None:
        """Give parameters their gradients: tensors in the blocks that a replayed backward took."""
        virtual, self._virtual_gradients = self._virtual_gradients, []
        for instance, call in virtual:
            for reference, slot in call.gradients:
                if (parameter := reference()) is None:
                    continue
                self._drain()
                self._binding.append((instance, slot))
                parameter.grad = self._torch.empty_strided(
                    parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device
                )
                self._drain()
                self._binding.clear()

    def _memoised(self, key: Key, name: str, run: Callable[[], Any]) -> Any:
        known = self._calls.get(key) if self.replays else None
        if known is not None and known.template.repeats and known.output is not None:
            return known.output.build(self._tensors(known, self._replay(known, []), []))
        self._materialise()
        self._handling_gradients += 1
        self._start(name, [])
        try:
            result = run()
        finally:
            call = self._stop()
            self._handling_gradients -= 1
        with suppress(CannotRepeat):
            call.output = ResultTree(result, self._layout_of(self._instance, []), self._torch.Tensor)
            self._calls[key] = call
        return result

    def _make_optimizer(self, plain: Any, optimizer: Any, *arguments: Any, **keywords: Any) -> None:
        plain(optimizer, *arguments, **keywords)
        optimizer.step = MethodType(_around(type(optimizer).step, self._step), optimizer)

    def _zero_grad(self, plain: Any, owner: Any, set_to_none: bool = True) -> Any:
        if self._template is not None:
            return plain(owner, set_to_none)
        if set_to_none:
            for instance, call in self._virtual_gradients:
                self.program.call(call.dropping(self.program), self.program.new_instance(), [instance])
            self._virtual_gradients = []
        self._handling_gradients += 1
        try:
            return plain(owner, set_to_none)
        finally:
            self._drain()
            self._handling_gradients -= 1

    def _step(self, plain: Any, optimizer: Any, *arguments: Any, **keywords: Any) -> Any:
        if self._template is not None:
            return plain(optimizer, *arguments, **keywords)
        self.own_blocks[self._present_is_real].append(self._takes)
        if arguments or keywords:
            self._materialise()
            result = plain(optimizer, *arguments, **keywords)
        else:
            key = ("step", id(optimizer), bool(optimizer.state), len(optimizer.param_groups))
            result = self._memoised(key, "optimizer", lambda: plain(optimizer))
        self._stepped = True
        self._begin(ProgramPart("between", self.step))
        return result

    def _clip(self, plain: Any, parameters: Any, *arguments: Any, **keywords: Any) -> Any:
        if self._template is not None:
            return plain(parameters, *arguments, **keywords)
        present = any(self._has_gradients(some) for some in self._parameters.values())
        key = ("clip", plain.__name__, present, len(arguments), tuple(keywords))
        return self._memoised(key, "clipping", lambda: plain(parameters, *arguments, **keywords))

    def _unscale(self, plain: Any, scaler: Any, optimizer: Any, *arguments: Any) -> Any:
        return self._memoised(("unscale", id(optimizer)), "unscaling", lambda: plain(scaler, optimizer, *arguments))

    # -- models

    def _call(self, plain: Any, module: Any, *arguments: Any, **keywords: Any) -> Any:
        inside = self._template is not None or self._device.attribution.modules
        if inside or self._torch.compiler.is_compiling() or self._is_traced():
            return plain(module, *arguments, **keywords)
        return self._forward(plain, module, arguments, keywords)

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
        batch: Any = keywords.get("input_ids", given[0] if given else None)
        self._root_begins(trains, tuple(batch.shape) if hasattr(batch, "shape") else (), replayed)
        previous = self._last_forward.get(id(module))
        before = [] if previous is None else [previous]
        if replayed:
            assert known is not None and known.output is not None
            instance = self._replay(known, before)
            self._last_forward[id(module)] = instance
            self._present_is_real = False
            if not trains:
                return known.output.build(self._tensors(known, instance, given))
            pending = PendingBackward(known, instance, is_real=False)
            self._pending.append(pending)
            if self._anchor is None:
                self._anchor = torch.zeros((), requires_grad=True)
            return known.output.build(list(_replayed_function(torch).apply(self._anchor, self, pending, given)))
        if trains:
            self._materialise()
        return self._run_forward(lambda: plain(module, *arguments, **keywords), module, key, given, before, trains)

    def _run_forward(
        self, run: Callable[[], Any], module: Any, key: Key | None, given: list[Any], before: list[int], trains: bool
    ) -> Any:
        instance = self._start("forward" if trains else "evaluation", before)
        try:
            output = run()
        finally:
            call = self._stop()
        self._last_forward[id(module)] = instance
        self._present_is_real = True
        try:
            call.output = ResultTree(output, self._layout_of(instance, given), self._torch.Tensor)
        except CannotRepeat as reason:
            self.notes.add(f"{type(module).__name__} is run at every step: {reason}")
            key = None
        if call.output is not None:
            call.left = sorted(set(call.left) - {layout.slot for layout in call.output.layouts})
        if key is not None:
            self._calls[key] = call
            self._fresh.append((key, instance, call))
        if trains:
            self._pending.append(PendingBackward(call if key is not None else None, instance, is_real=True))
            # Detect when a backward reaches what the model returned.
            found: list[Any] = []
            tensors_within(output, self._torch.Tensor, found, 4)
            for node in {tensor.grad_fn for tensor in found if tensor.grad_fn is not None}:
                node.register_prehook(self._backward_reached)
        return output

    def _key(
        self, module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], parameters: list[Any]
    ) -> tuple[Key | None, list[Any]]:
        """Return what determines a call, or None if unknown; and its tensors."""
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
        present = grad and self._has_gradients(parameters)
        state = (grad, torch.is_inference_mode_enabled(), autocast, module.training, present)
        return ("forward", id(module), state, pending, signature), given

    def _signature(self, name: str, value: Any, given: list[Any], depth: int = 4) -> Any:
        if isinstance(value, self._torch.Tensor):
            given.append(value)
            whole: bool | None = False
            if "mask" in name:  # models check whether it masks nothing, and take another path
                whole = None
                if not value.is_cuda or self._session.is_known(value):
                    with self._unseen():
                        whole = bool((value != 0).all())
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

    # -- backward

    def _backward_reached(self, *_: Any) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._start("backward", waiting)

    def _backward(self, plain: Any, *arguments: Any, **keywords: Any) -> Any:
        pending = [one for one in self._pending if not one.done]
        if self._template is not None or not pending:
            return plain(*arguments, **keywords)
        self._pending = []
        if len({one.is_real for one in pending}) > 1:
            raise Unfaithful("a backward goes through calls of which one is new and another was replayed")
        key = "backward", tuple(one.call.template.number if one.call else -1 for one in pending)
        instances = [one.instance for one in pending]
        if pending[0].is_real:
            self._waiting = instances
        else:
            self._replaying, self._replaying_arguments = self._calls.get(key), instances
            if self._replaying is None:
                raise Unfaithful("a backward of calls that were replayed has not been seen")
            for block in self._loose_before_backward:
                self.program.give(block)
            self._loose_before_backward = []
        call: RecordedCall | None = None
        try:
            result = plain(*arguments, **keywords)
        finally:
            self._waiting = None
            for one in pending:
                one.done = True
            if self._template is not None:
                call = self._stop()
        if call is None:  # it was replayed, or did not reach what was run
            return result
        # Note which gradients it made.
        instance = self._instance
        for parameters in self._parameters.values():
            for parameter in parameters:
                owner = self._owners.get(address_of(parameter.grad)) if parameter.grad is not None else None
                seen = {slot for _, slot in call.gradients}
                if owner is not None and owner[0] == instance and owner[1] in call.left and owner[1] not in seen:
                    call.gradients.append((weakref.ref(parameter), owner[1]))
        call.left = sorted({slot for _, slot in call.gradients}.intersection(call.left))
        if all(one.call is not None for one in pending):
            self._calls[key] = call
            self._fresh.append((key, instance, call))
        return result

    def replay_backward(self) -> None:
        """Replay a backward that has reached the result of a replayed call."""
        call, self._replaying = self._replaying, None
        if call is None:
            return
        instance = self._replay(call, self._replaying_arguments)
        if call.gradients:
            self._virtual_gradients.append((instance, call))
            if self._materialises:
                self._materialise()

    # -- data, and limits

    def _next_batch(self, plain: Any, iterator: Any) -> Any:
        self._loader = getattr(iterator, "_tonnage_loader", 0)
        if self._template is None and self.program.parts[-1].kind != "data":
            self._begin(ProgramPart("data", self.step))
        return plain(iterator)

    def _begin_epoch(self, plain: Any, loader: Any) -> Any:
        self._epochs[id(loader)] += 1
        # Evaluation loaders are iterated often.
        if 0 < self.most_epochs < self._epochs[id(loader)] and id(loader) in self._training_loaders:
            raise Stopped
        iterator = plain(loader)
        vars(iterator)["_tonnage_loader"] = id(loader)
        return iterator

    def _limit(self, plain: Any, fraction: float, device: Any = None) -> None:
        limit = int(fraction * self._device.gpu.memory_bytes) if fraction < 1 else -1
        self.program.operations.extend((Op.ALLOWED, limit))

    def _empty(self, plain: Any) -> None:
        self._drain()
        if self._template is None:
            self.program.operations.append(Op.EMPTY)
        else:
            self._template.events.extend((TemplateOp.EMPTY, 0, 0, 0))
        plain()


def _around(plain: Any, around: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def called(*arguments: Any, **keywords: Any) -> Any:
        return around(plain, *arguments, **keywords)

    return called


class _Graph:
    """Lives as long as the graph of a replayed call; drops what it held if it is freed without a backward."""

    def __init__(self, memo: Memo, pending: PendingBackward) -> None:
        self.memo, self.pending = memo, pending

    def __del__(self) -> None:
        program, pending = self.memo.program, self.pending
        if not pending.done and pending.call is not None:
            pending.done = True
            program.call(pending.call.dropping(program), program.new_instance(), [pending.instance])


@cache
def _replayed_function(torch: Any) -> Any:
    """Return the autograd function that stands for a whole model."""

    class Replayed(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, anchor: Any, memo: Memo, pending: PendingBackward, given: list[Any]) -> Any:
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

    return Replayed
