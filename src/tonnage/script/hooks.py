"""Connects PyTorch's hooks to the attribution: modules, the autograd engine, optimizers, and moved models."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as optim

from tonnage.script.attribution import Attribution


def install_hooks(who: Attribution, *, modules: bool = True) -> Callable[[], None]:
    """Install all hooks (without `modules`: only on outermost modules); the returned function removes them."""
    handles = [
        optim.register_optimizer_step_pre_hook(_outside_graphs(who.step_starts)),
        optim.register_optimizer_step_post_hook(_outside_graphs(who.step_ends)),
    ]
    _leave_to_python(who.module_starts, who.module_ends, who.step_starts, who.step_ends, who.mark_model)
    undo = [_wrap_engine(who), _wrap_apply(who), _wrap_optimizer(who), _wrap_call(who, outermost_only=not modules)]
    undo += [
        _wrap_phase(who, owner, name, phase)
        for owners, name, phase in (
            ((torch, torch.serialization), "save", "saving"),
            ((torch, torch.serialization), "load", "loading"),
            ((torch.nn.Module,), "load_state_dict", "loading"),
            ((optim.Optimizer,), "load_state_dict", "loading"),
        )
        for owner in owners
    ]

    def uninstall() -> None:
        for handle in handles:
            handle.remove()
        for restore in undo:
            restore()

    return uninstall


def _outside_graphs(act: Callable[[Any], None]) -> Callable[..., None]:
    """Make a compiled step break its graph for the hook: PyTorch's own steps break there anyway."""

    def hook(optimizer: Any, *_: Any) -> None:
        act(optimizer)

    hook._torchdynamo_disable = True  # type: ignore[attr-defined]
    return hook


def _wrap_engine(who: Attribution) -> Callable[[], None]:
    from torch.autograd import graph

    plain = graph._engine_run_backward

    def run_backward(*arguments: Any, **keywords: Any) -> Any:
        if _is_traced():
            return plain(*arguments, **keywords)
        who.backward_starts()
        try:
            return plain(*arguments, **keywords)
        finally:
            who.backward_ends()

    graph._engine_run_backward = torch.autograd._engine_run_backward = run_backward

    def restore() -> None:
        graph._engine_run_backward = torch.autograd._engine_run_backward = plain

    return restore


def _wrap_apply(who: Attribution) -> Callable[[], None]:
    """Wrap `Module.to` and similar: what is on the device afterwards is the model, even if not all of it fitted."""
    plain = torch.nn.Module._apply
    depth = 0

    def apply(self: Any, *arguments: Any, **keywords: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            return plain(self, *arguments, **keywords)
        finally:
            depth -= 1
            if not depth:
                who.mark_model(self)

    torch.nn.Module._apply = apply

    def restore() -> None:
        torch.nn.Module._apply = plain

    return restore


def _wrap_optimizer(who: Attribution) -> Callable[[], None]:
    """Wrap optimizers' creation: a script with one trains, so what it runs without gradients is not a step."""
    plain = optim.Optimizer.__init__

    @wraps(plain)
    def make(self: Any, *arguments: Any, **keywords: Any) -> None:
        plain(self, *arguments, **keywords)
        who.optimizer_made(self)

    optim.Optimizer.__init__ = make

    def restore() -> None:
        optim.Optimizer.__init__ = plain

    return restore


def _wrap_phase(who: Attribution, owner: Any, name: str, phase: str) -> Callable[[], None]:
    """Wrap saving and loading, which may allocate no block but are marked as a phase."""
    plain = getattr(owner, name)

    @wraps(plain)
    def within(*arguments: Any, **keywords: Any) -> Any:
        if any(isinstance(given, dict) and given.get("state") == {} for given in arguments):
            return plain(
                *arguments, **keywords
            )  # the state of an optimizer that has not stepped: accelerate moves optimizers this way
        with who.within(phase):
            return plain(*arguments, **keywords)

    setattr(owner, name, within)
    return lambda: setattr(owner, name, plain)


def _wrap_call(who: Attribution, *, outermost_only: bool) -> Callable[[], None]:
    """Wrap module calls: global module hooks would change what torch.compile captures and cause warnings."""
    plain = torch.nn.Module._call_impl

    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if torch.compiler.is_compiling() or (outermost_only and who.modules) or _is_traced():
            return plain(self, *arguments, **keywords)
        if not who.modules:
            who.keywords = keywords
        who.module_starts(getattr(self, "_orig_mod", self), arguments)  # torch.compile returns a wrapper
        output = None
        try:
            output = plain(self, *arguments, **keywords)
            return output
        finally:
            who.module_ends(self, output)

    call.__name__ = plain.__name__
    # Make Dynamo treat the function as one of PyTorch's: it decides by file what to inline and what to skip.
    call.__code__ = call.__code__.replace(co_filename=nn_module.__file__)
    _set_call(call)
    return lambda: _set_call(plain)


def _set_call(function: Callable[..., Any]) -> None:
    torch.nn.Module._call_impl = function
    for name in ("torch._dynamo.utils", "torch._dynamo.variables.nn_module"):
        if name in sys.modules:  # looked up once, at import
            vars(sys.modules[name])["unpatched_nn_module_call_impl"] = function


def _is_traced() -> bool:
    """Whether a graph is being traced now: AOTAutograd also runs backward, on tensors without memory."""
    return torch._guards.TracingContext.try_get() is not None


def _leave_to_python(*methods: Any) -> None:
    """Keep Dynamo out of what a compiled module's caller calls, and everything called from there."""
    native = torch._C._dynamo.eval_frame
    if not hasattr(native, "_FrameExecStrategy"):  # before 2.7
        return
    strategy = native._FrameExecStrategy(native._FrameAction.SKIP, native._FrameAction.SKIP)
    for method in methods:
        native.set_code_exec_strategy(method.__code__, strategy)
