"""Connects PyTorch's hooks to the attribution: modules, the autograd engine, optimizers, and moved models."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.autograd import graph
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as optim

from tonnage.script.attribution import Attribution
from tonnage.script.wrapping import wrap


def install_hooks(who: Attribution, *, modules: bool = True) -> Callable[[], None]:
    """Install all hooks (without `modules`: only on outermost modules); the returned function removes them."""
    undo = ExitStack()
    undo.callback(optim.register_optimizer_step_pre_hook(_outside_graphs(who.step_starts)).remove)
    undo.callback(optim.register_optimizer_step_post_hook(_outside_graphs(who.step_ends)).remove)
    # Keep Dynamo out of what a compiled module's caller calls, and everything called from there.
    native = torch._C._dynamo.eval_frame
    if hasattr(native, "_FrameExecStrategy"):  # since 2.7
        strategy = native._FrameExecStrategy(native._FrameAction.SKIP, native._FrameAction.SKIP)
        methods = (who.module_starts, who.module_ends, who.function_starts, who.function_ends)
        for method in (*methods, who.step_starts, who.step_ends, who.mark_model):
            native.set_code_exec_strategy(method.__code__, strategy)
    backward = partial(_backward, who)
    saving, loading = partial(_within, who, "saving"), partial(_within, who, "loading")
    for owner, name, around in (
        (graph, "_engine_run_backward", backward),
        (torch.autograd, "_engine_run_backward", backward),
        (torch.nn.Module, "_apply", partial(_apply, who, [])),
        (optim.Optimizer, "__init__", partial(_make, who)),
        (torch, "compile", partial(_compile, who)),
        # Saving and loading may allocate no block but are marked as a phase.
        (torch, "save", saving),
        (torch.serialization, "save", saving),
        (torch, "load", loading),
        (torch.serialization, "load", loading),
        (torch.nn.Module, "load_state_dict", loading),
        (optim.Optimizer, "load_state_dict", loading),
    ):
        wrap(undo, owner, name, around)
    undo.callback(_wrap_call(who, outermost_only=not modules))
    return undo.close


def _backward(who: Attribution, plain: Any, /, *arguments: Any, **keywords: Any) -> Any:
    if _is_traced():
        return plain(*arguments, **keywords)
    who.backward_starts()
    try:
        return plain(*arguments, **keywords)
    finally:
        who.backward_ends()


def _apply(who: Attribution, moving: list[Any], plain: Any, model: Any, /, *arguments: Any, **keywords: Any) -> Any:
    """Handle `Module.to` and similar: what is on the device afterwards is the model, even if not all of it fitted."""
    moving.append(model)
    try:
        return plain(model, *arguments, **keywords)
    finally:
        moving.pop()
        if not moving:
            who.mark_model(model)


def _make(who: Attribution, plain: Any, optimizer: Any, /, *arguments: Any, **keywords: Any) -> None:
    """Handle an optimizer: a script that has one trains, so what it runs without gradients is not a step."""
    plain(optimizer, *arguments, **keywords)
    who.optimizer_made(optimizer)


def _compile(who: Attribution, plain: Any, /, model: Any = None, **options: Any) -> Any:
    """Handle `torch.compile`: a compiled function calls no hooks of the modules within."""
    compiled = plain(model, **options)
    is_function = isinstance(model, (FunctionType, MethodType, partial))
    if not is_function or compiled is model:  # a module, a decorator's settings, or nothing is compiled here
        return compiled

    @wraps(compiled)
    def call(*arguments: Any, **keywords: Any) -> Any:
        if torch.compiler.is_compiling() or _is_traced():
            return compiled(*arguments, **keywords)
        who.function_starts(model, call, arguments, keywords)
        output = None  # if it fails
        try:
            result = compiled(*arguments, **keywords)
            output = () if result is None else result
            return result
        finally:
            who.function_ends(output)

    return call


def _within(who: Attribution, phase: str, plain: Any, /, *arguments: Any, **keywords: Any) -> Any:
    # The state of an optimizer that has not stepped: accelerate moves optimizers this way.
    if any(isinstance(given, dict) and given.get("state") == {} for given in arguments):
        return plain(*arguments, **keywords)
    with who.within(phase):
        return plain(*arguments, **keywords)


def _outside_graphs(act: Callable[[Any], None]) -> Callable[..., None]:
    """Make a compiled step break its graph for the hook: PyTorch's own steps break there anyway."""

    def hook(optimizer: Any, *_: Any) -> None:
        act(optimizer)

    hook._torchdynamo_disable = True  # type: ignore[attr-defined]
    return hook


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
