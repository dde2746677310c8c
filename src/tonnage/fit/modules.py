"""The shape of a live model: its repeated blocks, its head, and how to put a forward in place of another."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from types import MethodType
from typing import Any

import torch
from torch import nn

from tonnage.fit.training import Undo


def eagerly() -> AbstractContextManager[Any]:
    """Inside, compiled functions run as they were written: for shapes that are seen once, compiling takes longest."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


class ReplacedForward:
    """Stands in a module's `forward` for another function. Copied or pickled with the module, it is the plain forward again.

    The function may close over the module, and would compute with the original's weights in a copy of it.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any], before: Any) -> None:
        self.module, self.forward = module, forward
        self._before = before  # a forward that the module had of its own, or None for its class's

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name not in ("__wrapped__", "__signature__", "__name__"):
            raise AttributeError(name)
        return getattr(self.__dict__["forward"], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self.module))  # the module's copy is known before its attributes are copied
        if self._before is not None:
            return deepcopy(self._before, memo)
        return _plain_forward(self.module if copied is None else copied)

    def __reduce__(self) -> Any:
        if self._before is not None:
            return _as_it_is, (self._before,)
        return _plain_forward, (self.module,)


def _plain_forward(module: nn.Module) -> Any:
    return MethodType(type(module).forward, module)


def _as_it_is(value: Any) -> Any:
    return value


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Undo:
    """Let `module` run `forward`. Hooks, names and state dicts stay; undone in the reverse order of replacing."""
    before = module.__dict__.get("forward")
    plain = before._before if isinstance(before, ReplacedForward) else before
    # A method of this module goes with a copy as it is, and a compiler sees those of equal blocks as equal.
    is_method = isinstance(forward, MethodType) and forward.__self__ is module
    module.forward = forward if is_method else ReplacedForward(module, forward, plain)

    def undo() -> None:
        if before is not None:
            module.forward = before
        else:
            del module.__dict__["forward"]

    return undo


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks of a model by name, in order: members of the lists that hold most of its parameters.

    A block stands in an `nn.ModuleList` or `nn.Sequential` beside at least one other of its class and is not inside
    another block. A model without any has none.
    """
    blocks: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(block + ".") for block in blocks)
        if inside or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        blocks.update(_repeated_children(name, module))
    return blocks


def _repeated_children(name: str, container: nn.Module) -> dict[str, nn.Module]:
    children = list(container.named_children())
    classes = [type(child) for _, child in children]
    if len(children) < 2 or not all(_is_block(child) and classes.count(type(child)) > 1 for _, child in children):
        return {}
    prefix = f"{name}." if name else ""
    return {prefix + child_name: child for child_name, child in children}


def _is_block(module: nn.Module) -> bool:
    """Made of several parts with parameters: a transformer layer is, a single linear or a stage list is not.

    The parts may stand in a list of their own, where they are of different classes (T5) or each have one matrix (ResNet).
    """
    parts = _with_parameters(module)
    if len(parts) == 1 and _is_list(parts[0]) and not _is_list(module):
        parts = _with_parameters(parts[0])
        return len({type(part) for part in parts}) > 1 or (len(parts) > 1 and all(map(_has_one_matrix, parts)))
    return len(parts) > 1 and not _is_list(module)


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential)


def _has_one_matrix(module: nn.Module) -> bool:
    return sum(parameter.ndim > 1 for parameter in module.parameters()) == 1


def _with_parameters(module: nn.Module) -> list[nn.Module]:
    return [child for child in module.children() if any(True for _ in child.parameters())]


def uncompiled(model: nn.Module) -> Undo:
    """Let modules that were compiled in place (`module.compile()`) run as they are: a compiler would trace what fit puts in."""
    compiled = {
        module: module._compiled_call_impl for module in model.modules() if module._compiled_call_impl is not None
    }
    for module in compiled:
        module._compiled_call_impl = None

    def undo() -> None:
        for module, call in compiled.items():
            module._compiled_call_impl = call

    return undo


def caching_configs(model: nn.Module) -> list[Any]:
    """The configurations of transformers models that build a cache of keys and values."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    return [config for config in configs.values() if getattr(config, "use_cache", False)]


def without_cache(model: nn.Module) -> Undo:
    """Keep a transformers model from building a cache of keys and values, which training never reads.

    It holds each layer's keys and values, grows again whenever a block is run twice, and makes each block another one
    to a compiler. Loss and gradients hardly ever depend on it (`measuring.is_cache_idle`).
    """
    caching = caching_configs(model)
    for config in caching:
        config.use_cache = False

    def undo() -> None:
        for config in caching:
            config.use_cache = True

    return undo
