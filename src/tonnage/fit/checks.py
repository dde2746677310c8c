"""What is wrong with a request to fit, said before anything is touched."""

from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from tonnage.errors import RequestError
from tonnage.fit.stepping.batches import tensors
from tonnage.fit.training import Batch

# Models that fit has changed and not yet given back.
FITTED: "WeakSet[nn.Module]" = WeakSet()


def check_request(model: Any, optimizer: Any, sample: Batch) -> torch.device:
    """The device of a training that can be fitted."""
    check_model(model, optimizer)
    device = next(model.parameters()).device
    check_sample(sample, device)
    return device


def check_model(model: Any, optimizer: Any) -> None:
    if not isinstance(model, nn.Module):
        raise RequestError(
            f"fit wants a torch.nn.Module, and got {type(model).__name__}.", hint="Give the model itself."
        )
    if not isinstance(optimizer, Optimizer):
        raise RequestError(
            f"fit wants a torch optimizer, and got {type(optimizer).__name__}.",
            hint="Give the optimizer, not a scheduler.",
        )
    _check_wrapping(model)
    _check_parameters(model, optimizer)


def _check_wrapping(model: nn.Module) -> None:
    if model in FITTED:
        raise RequestError("This model is fitted already.", hint="Call undo() on what fit returned, then fit again.")
    name = type(model).__name__
    if (
        isinstance(model, DataParallel | DistributedDataParallel)
        or name.startswith("FSDP")
        or hasattr(model, "_orig_mod")
    ):
        raise RequestError(
            f"The model is wrapped already ({name}), and what is inside cannot be changed safely.",
            hint="Give fit the plain module, and wrap it afterwards.",
        )


def _check_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    owned = {id(parameter) for parameter in model.parameters()}
    if not owned:
        raise RequestError("The model has no parameters.", hint="Give the model that is to be trained.")
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in owned]
    if foreign:
        raise RequestError(
            f"The optimizer steps {len(foreign)} parameters that are not the model's.",
            hint="Make the optimizer from this model's parameters, after it was moved and wrapped.",
        )
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        names = ", ".join(sorted(str(device) for device in devices))
        raise RequestError(f"The model's parameters are spread over {names}.", hint="Put the model on one device.")


def check_sample(sample: Batch, device: torch.device) -> None:
    found = list(tensors(sample))
    if not found:
        raise RequestError("The sample holds no tensor.", hint="Give one batch as the training loop sees it.")
    away = next((tensor for tensor in found if tensor.device.type != device.type), None)
    if away is not None:
        raise RequestError(
            f"The sample is on {away.device} and the model on {device}.", hint="Move the sample to the model's device."
        )


def check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise RequestError(f"The loss is not a scalar: {found}.", hint="Return the mean or the sum from loss=.")
    if not loss.requires_grad:
        raise RequestError(
            "The loss does not depend on the model's parameters.", hint="Is the model frozen, or under no_grad?"
        )
