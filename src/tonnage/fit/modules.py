"""The shape of a live model: its repeated blocks, its head, and how to put a forward in place of another."""

from collections.abc import Callable
from typing import Any

from torch import nn

from tonnage.fit.training import Undo


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Undo:
    """Let `module` run `forward`. Hooks, names and state dicts stay; undone in the reverse order of replacing."""
    had_own = "forward" in module.__dict__
    before = module.forward
    module.forward = forward

    def undo() -> None:
        if had_own:
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
    """Made of several parts with parameters: a transformer layer is, a single linear or a stage list is not."""
    with_parameters = [child for child in module.children() if any(True for _ in child.parameters())]
    return len(with_parameters) > 1 and not isinstance(module, nn.ModuleList | nn.Sequential)


def without_cache(model: nn.Module) -> Undo:
    """Keep a transformers model from building a cache of keys and values, which training never reads.

    It holds each layer's keys and values, grows again whenever a block is run twice, and makes each block another one
    to a compiler. Loss and gradients do not depend on it.
    """
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    caching = [config for config in configs.values() if getattr(config, "use_cache", False)]
    for config in caching:
        config.use_cache = False

    def undo() -> None:
        for config in caching:
            config.use_cache = True

    return undo
