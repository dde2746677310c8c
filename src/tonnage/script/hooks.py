"""PyTorch's own hooks, wired to the attribution: modules, the autograd engine, optimizers, and models on the move."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as optim

from tonnage.script.attribution import Attribution


def install_hooks(who: Attribution, *, modules: bool = True) -> Callable[[], None]:
    """Hook everything (without `modules`: of modules only the outermost); the result unhooks it."""
    handles = [
        optim.register_optimizer_step_pre_hook(lambda o, *_: who.step_starts(o)),
        optim.register_optimizer_step_post_hook(lambda o, *_: who.step_ends(o)),
    ]
    if modules:
        starts, ends = _module_hooks(who)
        handles += [
            nn_module.register_module_forward_pre_hook(starts),
            nn_module.register_module_forward_hook(ends, always_call=True),
        ]
    undo = [_wrap_engine(who), _wrap_apply(who), _wrap_call(who) if modules else _wrap_outermost_call(who)]

    def uninstall() -> None:
        for handle in handles:
            handle.remove()
        for restore in undo:
            restore()

    return uninstall


def _module_hooks(who: Attribution) -> tuple[Callable[..., None], Callable[..., None]]:
    """While torch.compile traces, they are nothing: what they do is no part of a graph."""

    def starts(module: Any, arguments: tuple[Any, ...]) -> None:
        if not torch.compiler.is_compiling():
            who.module_starts(module, arguments)

    def ends(module: Any, arguments: tuple[Any, ...], output: Any) -> None:
        if not torch.compiler.is_compiling():
            who.module_ends(module, output)

    return starts, ends


def _wrap_engine(who: Attribution) -> Callable[[], None]:
    """Every backward goes through this one function of torch.autograd."""
    from torch.autograd import graph

    plain = graph._engine_run_backward

    def run_backward(*arguments: Any, **keywords: Any) -> Any:
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
    """`Module.to` and kin: what is on the device afterwards is the model, even if it did not all fit."""
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


def _wrap_call(who: Attribution) -> Callable[[], None]:
    """What the outermost module is given by name: hooks on all modules at once see only what is given by position."""
    plain = torch.nn.Module._call_impl

    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if not torch.compiler.is_compiling() and not who.modules:
            who.keywords = keywords
        return plain(self, *arguments, **keywords)

    torch.nn.Module._call_impl = call

    def restore() -> None:
        torch.nn.Module._call_impl = plain

    return restore


def _wrap_outermost_call(who: Attribution) -> Callable[[], None]:
    """Only where no module is at work: the inner ones pay for one comparison."""
    plain = torch.nn.Module._call_impl

    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if torch.compiler.is_compiling() or who.modules:
            return plain(self, *arguments, **keywords)
        who.keywords = keywords
        who.module_starts(self, arguments)
        output = None
        try:
            output = plain(self, *arguments, **keywords)
            return output
        finally:
            who.module_ends(self, output)

    torch.nn.Module._call_impl = call

    def restore() -> None:
        torch.nn.Module._call_impl = plain

    return restore
