"""Optimizer steps, clipping, unscaling and clearing of gradients: run once, then replayed.

Gradients of a replayed backward have blocks but no tensors; `_materialise` makes these for whatever has to be run.
"""

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

from tonnage.certify.calls import CannotRepeat, Key, RecordedCall, ResultTree
from tonnage.certify.events import Events
from tonnage.certify.program import ProgramPart


class GradientEvents(Events):
    """Records and replays operations on gradients."""

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
        known = self._calls.get(key) if self.replays else None
        if known is not None and known.template.repeats and known.output is not None:
            instance = self._replay(known, [])
            return known.output.build(self._tensors(known, instance, []))
        self._materialise()
        self._handling_gradients += 1
        found: list[RecordedCall] = []
        try:
            with self._written_down(name, [], found):
                result = run()
        finally:
            self._handling_gradients -= 1
        try:
            found[0].output = ResultTree(result, self._layout_of(self._instance, []), self._torch.Tensor)
            self._calls[key] = found[0]
        except CannotRepeat:
            pass
        return result

    def _wrap_optimizers(self) -> None:
        from torch.optim import optimizer as optim

        memo, plain_init = self, optim.Optimizer.__init__

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

        self._patch([optim.Optimizer], "__init__", make)
        for owner in (optim.Optimizer, self._torch.nn.Module):
            self._patch([owner], "zero_grad", zero(owner.zero_grad))

    def _step(self, optimizer: Any, run: Callable[[], Any], repeats: bool) -> Any:
        if self._template is not None:
            return run()
        self.own_blocks[self._present_is_real].append(self._takes)
        if not repeats:
            self._materialise()
            result = run()
        else:
            key = ("step", id(optimizer), bool(optimizer.state), len(optimizer.param_groups))
            result = self._memoised(key, "optimizer", run)
        self._stepped = True
        self._begin(ProgramPart("between", self.step))
        return result

    def _wrap_gradients(self) -> None:
        utils, scaler = self._torch.nn.utils, self._torch.amp.GradScaler

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
            self._patch((utils.clip_grad, utils), name, clip(getattr(utils.clip_grad, name)))

        def unscale(plain: Any) -> Any:
            @wraps(plain)
            def unscaled(scaler: Any, optimizer: Any, *arguments: Any) -> Any:
                key = ("unscale", id(optimizer))
                return self._memoised(key, "unscaling", lambda: plain(scaler, optimizer, *arguments))

            return unscaled

        self._patch([scaler], "_unscale_grads_", unscale(scaler._unscale_grads_))
