"""An optimizer that steps other parameters than before, with its states: sharded ones for plain ones, and back.

Groups stay the same objects, so schedulers go on. It does not know FSDP2.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

Change = Callable[[Tensor, nn.Parameter], Tensor]


def retarget(optimizer: Optimizer, replaced: Mapping[nn.Parameter, nn.Parameter], change: Change) -> None:
    """Let the optimizer step the new parameter in place of each old one; states of its shape are changed likewise."""
    for group in optimizer.param_groups:
        group["params"][:] = [replaced.get(parameter, parameter) for parameter in group["params"]]
    for old, new in replaced.items():
        if old in optimizer.state:
            state = optimizer.state.pop(old)
            optimizer.state[new] = {name: _changed(value, new, change) for name, value in state.items()}


def _changed(value: Any, new: nn.Parameter, change: Change) -> Any:
    return change(value, new) if isinstance(value, Tensor) and value.shape == new.shape and value.dim() else value


@torch.no_grad()
def sharded_like(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """The same placement as a sharded parameter's. The values are those of the mesh's first rank."""
    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    device = torch.device(mesh.device_type, torch.cuda.current_device()) if mesh.device_type == "cuda" else "cpu"
    return distribute_tensor(value.detach().to(device), mesh, parameter.placements).to(parameter.device)


@torch.no_grad()
def whole_like(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """All of a sharded tensor, where the parameter is."""
    return whole(value).to(parameter.device)


def whole(value: Tensor) -> Tensor:
    """All of a sharded tensor; one that is kept on the host goes over the mesh's device."""
    if not isinstance(value, DTensor):
        return value.detach()
    return value.detach().to(value.device_mesh.device_type).full_tensor()
