"""The structure of a live model: its blocks and dropouts, replacing a forward, and running one without a trace."""

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from itertools import pairwise
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tonnage.fit.recomputing.remembered import Generators, held_generators
from tonnage.fit.stepping.batches import named_tensors, take_rows
from tonnage.fit.training import Training, Undo, set_attributes
from tonnage.fit.virtual import on_virtual_gpu

OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_DROPOUTS = (nn.modules.dropout._DropoutNd, nn.AlphaDropout)
# Rates that attention modules of transformers and timm hold as plain numbers, and drop path.
_RATES = ("attention_dropout", "attn_drop_rate", "dropout_p", "drop_prob", "dropout_prob")


def eagerly() -> AbstractContextManager[Any]:
    """Run compiled functions eagerly inside this context: for shapes seen once, compiling takes longest."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def kept_modes(model: nn.Module, *, evaluating: bool) -> Iterator[None]:
    """Restore the training mode of each module on exit; with `evaluating`, the model is in eval mode inside."""
    modes = {module: module.training for module in model.modules()}
    if evaluating:
        model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


class ReplacedForward:
    """A replacement for a module's `forward`. Copied or pickled with the module, it becomes the plain forward again.

    The function may close over the module, and a copy would compute with the original's weights.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any], before: Any) -> None:
        self.module, self.forward = module, forward
        self._before = before  # the instance's own forward, or None for that of its class

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
        return (_as_it_is, (self._before,)) if self._before is not None else (_plain_forward, (self.module,))


def _plain_forward(module: nn.Module) -> Any:
    return MethodType(type(module).forward, module)


def _as_it_is(value: Any) -> Any:
    return value


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Undo:
    """Make `module` run `forward`. Hooks, names and state dicts stay; undo in reverse order of replacing."""
    before = module.__dict__.get("forward")
    plain = before._before if isinstance(before, ReplacedForward) else before
    # A bound method survives copying as it is, and the compiler treats those of equal blocks as equal.
    is_method = isinstance(forward, MethodType) and forward.__self__ is module
    return set_attributes(module, forward=forward if is_method else ReplacedForward(module, forward, plain))


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks of a model by name, in order.

    A block is in an `nn.ModuleList` or `nn.Sequential` with at least one other of its class, and not inside another
    block. A model may have none.
    """
    blocks: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if name.startswith(tuple(f"{block}." for block in blocks)) or not _is_list(module):
            continue
        children, prefix = dict(module.named_children()), f"{name}." if name else ""
        classes = Counter(type(child) for child in children.values())
        if len(children) > 1 and all(_is_block(child) and classes[type(child)] > 1 for child in children.values()):
            blocks |= {prefix + child_name: child for child_name, child in children.items()}
    return blocks


def _is_block(module: nn.Module) -> bool:
    """Return whether it has several parts with parameters, as a transformer layer has, unlike a linear or a stage list.

    The parts may be in a list of their own, if their classes differ (T5) or each has one matrix (ResNet).
    """
    parts = _with_parameters(module)
    if len(parts) == 1 and _is_list(parts[0]) and not _is_list(module):
        parts = _with_parameters(parts[0])
        matrices = [sum(parameter.ndim > 1 for parameter in part.parameters()) for part in parts]
        return len({type(part) for part in parts}) > 1 or (len(parts) > 1 and set(matrices) == {1})
    return len(parts) > 1 and not _is_list(module)


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential)


def _with_parameters(module: nn.Module) -> list[nn.Module]:
    return [child for child in module.children() if any(True for _ in child.parameters())]


def why_not_blocks(model: nn.Module, names: tuple[str, ...]) -> str | None:
    """Return what is wrong with these block names, or None if they exist and do not overlap."""
    if not names:
        return "no block was named"
    modules = dict(model.named_modules())
    unknown = next((name for name in names if name not in modules), None)
    if unknown is not None:
        return f"the model has no block {unknown!r}"
    for outer, inner in pairwise(sorted(f"{name}." for name in names)):
        if inner == outer:
            return f"the block {inner[:-1]!r} was named twice"
        if inner.startswith(outer):
            return f"the block {inner[:-1]!r} is inside {outer[:-1]!r}"
    return None


def uncompiled(model: nn.Module) -> Undo:
    """Run modules compiled in place (`module.compile()`) uncompiled: the compiler would trace what fit adds."""
    compiled = [module for module in model.modules() if module._compiled_call_impl is not None]
    return _set_all(compiled, _compiled_call_impl=None)


def _set_all(owners: Iterable[Any], **values: Any) -> Undo:
    with ExitStack() as stack:
        for owner in owners:
            stack.callback(set_attributes(owner, **values))
        return stack.pop_all().close


def caching_configs(model: nn.Module) -> list[Any]:
    """Return the configurations of transformers models that build a KV cache."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    return [config for config in configs.values() if getattr(config, "use_cache", False)]


def without_cache(model: nn.Module) -> Undo:
    """Keep a transformers model from building a KV cache, which training never reads.

    It holds each layer's keys and values, grows whenever a block runs twice, and makes each block different to the
    compiler. Loss and gradients rarely depend on it (`is_cache_idle`).
    """
    return _set_all(caching_configs(model), use_cache=False)


def active_dropout(module: nn.Module) -> str | None:
    """Return the name of a module with active dropout, or None. Dropout inside a plain function is not detected."""
    active = ((name, child) for name, child in module.named_modules() if child.training and _drops(child))
    return next((name or type(child).__name__ for name, child in active), None)


def dropouts(module: nn.Module) -> list[nn.Module]:
    """Return the submodules that drop values at random in training mode."""
    return [child for child in module.modules() if _drops(child)]


def _drops(module: nn.Module) -> bool:
    if isinstance(module, _DROPOUTS):
        return module.p > 0
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return module.dropout > 0
    rates = [getattr(module, name, 0) for name in _RATES]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


# Forward passes that leave a training unchanged -----------------------------------------------------------------------


@contextmanager
def undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore on exit whatever a forward pass may change besides gradients.

    That is RNG states (PyTorch, Python, NumPy and generators that modules hold), buffers, and numbers and tensors
    that modules keep as plain attributes.
    """
    # Each dict of buffers or attributes, with what a forward pass may change there.
    dicts = [held for module in model.modules() for held in (module._buffers, vars(module))]
    before = [(held, {k: v for k, v in held.items() if _changes_in_forward(k, v)}) for held in dicts]
    tensors = {id(v): v for _, values in before for v in values.values() if isinstance(v, Tensor)}
    copies = [(tensor, tensor.detach().clone()) for tensor in tensors.values()]
    generators = Generators(device, held_generators(model))
    states = generators.states()
    try:
        yield
    finally:
        generators.set(states)
        with torch.no_grad():
            for tensor, copy in copies:
                tensor.detach().copy_(copy)
        for held, values in before:
            if "_buffers" in held:  # attributes, of which new ones are removed
                for name in [k for k, v in held.items() if k not in values and _changes_in_forward(k, v)]:
                    del held[name]
            for name, value in values.items():
                held[name] = value


def draw_others(device: torch.device) -> None:
    """Advance the random generators, so that a repeated pass samples different numbers."""
    random.random()
    np.random.random()
    torch.rand(1)
    torch.rand(1, device=device)


def _changes_in_forward(name: str, value: Any) -> bool:
    """Match counters, rates and tensors that a forward pass leaves behind; not what `nn.Module` itself keeps."""
    return name not in OF_EVERY_MODULE and isinstance(value, int | float | Tensor | None)


def is_cache_idle(training: Training) -> bool:
    """Return whether the loss is the same without a KV cache.

    It differs where transformers separates packed documents by their positions, which it does only without a cache.
    """
    if training.mesh is not None or training.ranks is not None or on_virtual_gpu(training.device):
        return "position_ids" not in dict(named_tensors(training.sample))
    if not caching_configs(training.model):
        return True
    losses = []
    with undisturbed(training.model, training.device), torch.no_grad(), eagerly(), ExitStack() as stack:
        stack.callback(without_cache(training.model))
        try:
            for _ in range(2):  # without a cache, then with it
                torch.manual_seed(0)
                with training.forward_pass():
                    losses.append(float(training.loss(training.model, take_rows(training.sample, slice(0, 2)))))
                stack.close()
        except Exception:
            return True  # the error will show again where it matters
    return abs(losses[0] - losses[1]) <= 1e-5 * abs(losses[1])
