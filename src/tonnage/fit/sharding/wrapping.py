"""FSDP2 put on a model, and taken off again.

`fully_shard` changes a model in place: a class of its own for each wrapped module, hooks, and sharded parameters in the
place of plain ones. PyTorch has no way back. Here there is one: what FSDP2 added is told by the module that it comes from.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from tonnage.fit.sharding.states import whole

_FSDP = "torch.distributed.fsdp"
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_MARKS = (STATE_KEY, REGISTRY_KEY, "_is_fsdp_managed_module", "_fsdp_use_orig_params")


class Plain:
    """The plain parameters of a model: the objects, emptied while sharded ones stand in their places."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.devices = {name: parameter.device for name, parameter in self.parameters.items()}

    def wrap(self, model: nn.Module, blocks: Sequence[str], *, keep_blocks: bool, **policies: Any) -> None:
        """Each block by itself, then the rest. `keep_blocks`: they are unsharded until backward.

        The rest (embedding, norm, head) is so in any case: a loss in chunks reads the head's weight after the model's
        forward is over.
        """
        for name in blocks:
            fully_shard(model.get_submodule(name), reshard_after_forward=not keep_blocks, **policies)
            self._empty(f"{name}.")
        fully_shard(model, reshard_after_forward=False, **policies)
        self._empty("")

    def _empty(self, prefix: str) -> None:
        """The sharded ones have copies of their parts: nobody needs the whole."""
        for name, parameter in self.parameters.items():
            if name.startswith(prefix):
                parameter.data = parameter.data.new_empty(0)

    @torch.no_grad()
    def unwrap(self, model: nn.Module) -> None:
        """What the sharded ones hold, back in the plain ones and in plain modules."""
        sharded = dict(model.named_parameters(remove_duplicate=False))
        filled: set[int] = set()  # one that has two names is filled once
        for name, parameter in self.parameters.items():
            if isinstance(sharded[name], DTensor) and id(parameter) not in filled:
                parameter.data = whole(sharded[name]).to(self.devices[name])
                filled.add(id(parameter))
        for module in model.modules():
            _strip(module)
        for name, parameter in self.parameters.items():
            owner, _, own_name = name.rpartition(".")
            model.get_submodule(owner)._parameters[own_name] = parameter


def reshard(model: nn.Module) -> None:
    """After a forward without a backward the rest is still unsharded: its plain parameters stand in the model."""
    for module in _wrapped(model):
        module.reshard()


def forget_step(model: nn.Module) -> None:
    """After a step that raised: ready for the next, without what of its gradients was not exchanged yet."""
    for module in _wrapped(model):
        if module is model and hasattr(module, "reset_iter_state"):  # not in the oldest PyTorch that we know
            module.reset_iter_state()
        for group in _groups(module):
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None


def _wrapped(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _groups(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    found = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in found if group is not None]


def _strip(module: nn.Module) -> None:
    if isinstance(module, FSDPModule):
        module.__class__ = type(module).__mro__[FSDPModule._orig_cls_mro_index]
    for mark in _MARKS:
        module.__dict__.pop(mark, None)
    _module_state_mapping.pop(module, None)
    for hooks in (module.__dict__[name] for name in _HOOKS):
        for key in list(_of_fsdp(hooks)):
            del hooks[key]
            for flags in (module._forward_hooks_with_kwargs, module._forward_pre_hooks_with_kwargs):
                flags.pop(key, None)


def _of_fsdp(hooks: Mapping[int, Any]) -> Iterator[int]:
    for key, hook in hooks.items():
        inner = getattr(hook, "hook", hook)  # the wrapper that passes the module on
        if str(getattr(inner, "__module__", "")).startswith(_FSDP):
            yield key
