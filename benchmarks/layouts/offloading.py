"""What leaves the card for the host: the optimizer with its states, and what the forward pass saves for the backward one."""

import contextlib
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks


class HostAdamW:
    """AdamW on the host, as torchao's `CPUOffloadOptimizer` does it: gradients come down, parameters go back up."""

    def __init__(self, model: nn.Module) -> None:
        self._pairs = [
            (parameter, nn.Parameter(parameter.detach().cpu()))
            for parameter in model.parameters()
            if parameter.requires_grad
        ]
        self._optimizer = torch.optim.AdamW([on_host for _, on_host in self._pairs], lr=1e-4, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        """One update."""
        for parameter, on_host in self._pairs:
            assert parameter.grad is not None
            on_host.grad = parameter.grad.cpu()
        self._optimizer.step()
        for parameter, on_host in self._pairs:
            parameter.copy_(on_host)

    def zero_grad(self) -> None:
        """On both sides."""
        for parameter, on_host in self._pairs:
            parameter.grad = on_host.grad = None


def saved_on_host(model: nn.Module, offloaded: bool) -> contextlib.AbstractContextManager[Any]:
    """What autograd saves goes to the host, but for parameters: as `save_on_cpu` does it, and TRL and torchtune."""
    if not offloaded:
        return contextlib.nullcontext()
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> tuple[bool, torch.Tensor]:
        stays = (
            not tensor.is_cuda or tensor.numel() * tensor.itemsize < 1024 or tensor.untyped_storage().data_ptr() in own
        )
        return (False, tensor) if stays else (True, tensor.cpu())

    def unpack(packed: tuple[bool, torch.Tensor]) -> torch.Tensor:
        moved, tensor = packed
        return tensor.cuda() if moved else tensor

    return saved_tensors_hooks(pack, unpack)
