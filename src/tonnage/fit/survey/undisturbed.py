"""Run forward passes that leave a training unchanged: RNG states, buffers, attributes, KV caches."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tonnage.fit.modules import caching_configs, eagerly, without_cache
from tonnage.fit.stepping.batches import named_tensors, take_rows
from tonnage.fit.training import Training
from tonnage.fit.virtual import on_virtual_gpu

OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@contextmanager
def undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore on exit whatever a forward pass may change besides gradients.

    That is RNG states (PyTorch, Python, NumPy and generators that modules hold), buffers, and numbers and tensors
    that modules keep as plain attributes.
    """
    modules = list(model.modules())
    buffers = [(module, dict(module._buffers)) for module in modules]
    values = {id(b): b.detach().clone() for _, held in buffers for b in held.values() if b is not None}
    attributes = [(module, {k: v for k, v in vars(module).items() if _changes_in_forward(k, v)}) for module in modules]
    kept = {id(v): v.detach().clone() for _, held in attributes for v in held.values() if isinstance(v, Tensor)}
    generators = {v: v.get_state() for m in modules for v in vars(m).values() if isinstance(v, torch.Generator)}
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for generator, state in generators.items():
            generator.set_state(state)
        with torch.no_grad():
            for module, held in buffers:
                for name, buffer in held.items():
                    module._buffers[name] = _as_before(buffer, values)
            for module, held in attributes:
                for name in [k for k, v in vars(module).items() if k not in held and _changes_in_forward(k, v)]:
                    delattr(module, name)
                vars(module).update({name: _as_before(value, kept) for name, value in held.items()})


def draw_others(device: torch.device) -> None:
    """Advance the random generators, so that a repeated pass samples different numbers."""
    random.random()
    np.random.random()
    torch.rand(1)
    torch.rand(1, device=device)


def _changes_in_forward(name: str, value: Any) -> bool:
    """Match counters, rates and tensors that a forward pass leaves behind; not what `nn.Module` itself keeps."""
    return name not in OF_EVERY_MODULE and isinstance(value, int | float | Tensor | None)


def _as_before(value: Any, copies: dict[int, Tensor]) -> Any:
    """Restore a tensor's elements in place and return the same object."""
    if isinstance(value, Tensor) and id(value) in copies:
        value.detach().copy_(copies[id(value)])
    return value


def is_cache_idle(training: Training) -> bool:
    """Return whether the loss is the same without a KV cache.

    It differs where transformers separates packed documents by their positions, which it does only without a cache.
    """
    if training.mesh is not None or training.ranks is not None or on_virtual_gpu(training.device):
        return "position_ids" not in dict(named_tensors(training.sample))
    if not caching_configs(training.model):
        return True
    losses = []
    with undisturbed(training.model, training.device), torch.no_grad(), eagerly():
        undo = without_cache(training.model)
        try:
            for again in (lambda: None, undo):  # without a cache, then with it
                again()
                torch.manual_seed(0)
                with training.forward_pass():
                    losses.append(float(training.loss(training.model, take_rows(training.sample, slice(0, 2)))))
        except Exception:
            return True  # the error will show again where it matters
        finally:
            undo()
    return abs(losses[0] - losses[1]) <= 1e-5 * abs(losses[1])
