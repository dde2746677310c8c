"""Wrap a model with FSDP2, and unwrap it again.

`fully_shard` changes a model in place: new classes for wrapped modules, hooks, and sharded parameters in place of
plain ones. PyTorch cannot undo this. Here, what FSDP2 added is recognized by the module that defines it. The
optimizer is switched between plain and sharded parameters; its groups stay the same objects, so schedulers keep
working.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

_FSDP = "torch.distributed.fsdp"
_HOOKS = [name for name in vars(nn.Module()) if name.endswith("_hooks")]
Change = Callable[[Tensor, nn.Parameter], Tensor]
_MARKS = (STATE_KEY, REGISTRY_KEY, "_is_fsdp_managed_module", "_fsdp_use_orig_params")


class Plain:
    """The plain parameters of a model, emptied while sharded ones replace them."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.devices = {name: parameter.device for name, parameter in self.parameters.items()}

    def wrap(self, model: nn.Module, blocks: Sequence[str], *, keep_blocks: bool, **policies: Any) -> None:
        """Wrap each block, then the rest. With `keep_blocks`, blocks stay unsharded until backward.

        The rest (embedding, norm, head) always does: a chunked loss reads the head's weight after the model's
        forward.
        """
        for name in blocks:
            fully_shard(model.get_submodule(name), reshard_after_forward=not keep_blocks, **policies)
            self._empty(f"{name}.")
        fully_shard(model, reshard_after_forward=False, **policies)
        self._empty("")

    def _empty(self, prefix: str) -> None:
        """Free the whole parameters, since the shards are copies."""
        for name, parameter in self.parameters.items():
            if name.startswith(prefix):
                parameter.data = parameter.data.new_empty(0)

    @torch.no_grad()
    def unwrap(self, model: nn.Module) -> None:
        """Copy the sharded values back into plain parameters and restore plain modules."""
        sharded = dict(model.named_parameters(remove_duplicate=False))
        filled: set[int] = set()  # fill a parameter with two names once
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
    """Reshard after a forward without a backward, which leaves the rest of the model unsharded."""
    for module in _wrapped(model):
        module.reshard()


def forget_step(model: nn.Module) -> None:
    """Reset FSDP2 after a step that raised, dropping gradients not yet reduced."""
    for module in _wrapped(model):
        # Not in the oldest supported PyTorch.
        if module is model and hasattr(module, "reset_iter_state"):  # type: ignore[comparison-overlap]
            module.reset_iter_state()
        state: Any = module._get_fsdp_state()
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        for group in (group for group in groups if group is not None):
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None


def _wrapped(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _strip(module: nn.Module) -> None:
    if isinstance(module, FSDPModule):
        module.__class__ = type(module).__mro__[FSDPModule._orig_cls_mro_index]
    for mark in _MARKS:
        module.__dict__.pop(mark, None)
    _module_state_mapping.pop(module, None)
    for hooks in (module.__dict__[name] for name in _HOOKS):
        for key, hook in list(hooks.items()):
            inner = getattr(hook, "hook", hook)  # unwrap the hook that also passes the module
            if str(getattr(inner, "__module__", "")).startswith(_FSDP):
                del hooks[key]
                for flags in (module._forward_hooks_with_kwargs, module._forward_pre_hooks_with_kwargs):
                    flags.pop(key, None)


# The optimizer --------------------------------------------------------------------------------------------------------


def retarget(optimizer: Optimizer, replaced: Mapping[nn.Parameter, nn.Parameter], change: Change) -> None:
    """Replace each old parameter of the optimizer by the new one; states of its shape are converted."""
    for group in optimizer.param_groups:
        group["params"][:] = [replaced.get(parameter, parameter) for parameter in group["params"]]
    for old, new in replaced.items():
        if old in optimizer.state:
            state = optimizer.state.pop(old)
            of_its_shape = {n for n, v in state.items() if isinstance(v, Tensor) and v.shape == new.shape and v.dim()}
            optimizer.state[new] = {n: change(v, new) if n in of_its_shape else v for n, v in state.items()}


@torch.no_grad()
def sharded_like(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """Distribute a value like a sharded parameter. The values are those of the mesh's first rank."""
    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    device = torch.device(mesh.device_type, torch.cuda.current_device()) if mesh.device_type == "cuda" else "cpu"
    return distribute_tensor(value.detach().to(device), mesh, parameter.placements).to(parameter.device)


def whole(value: Tensor) -> Tensor:
    """Return the full tensor; a shard kept on the host is gathered through the mesh's device."""
    if not isinstance(value, DTensor):
        return value.detach()
    gathered: Tensor = value.detach().to(value.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]
    return gathered
