"""Hold FP32 parameters of a live model in BF16, while its state dicts stay those of the FP32 model.

Parameter objects stay; their storage changes. Callbacks supply the FP32 values of trained parameters.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from tonnage.fit.modules import replace_forward

NARROW = torch.bfloat16


def wide_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the FP32 parameters that can become BF16. Batch norms keep FP32: their kernels take it with BF16 inputs."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    kept = {parameter for norm in norms for parameter in norm.parameters(recurse=False)}
    return [p for p in model.parameters() if p.dtype == torch.float32 and p not in kept]


def why_not_narrow(model: nn.Module) -> str | None:
    """Return why the FP32 parameters of this model cannot change their dtype, or None."""
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        return "DistributedDataParallel has made its buckets for gradients of the types that it saw"
    if any(type(parameter.data) is not Tensor for parameter in wide_parameters(model)):
        return "some parameters are sharded or of a tensor type of their own"
    return None


def set_storage(parameter: nn.Parameter, data: Tensor) -> None:
    """Replace a parameter's data; an existing gradient is converted to the same dtype."""
    gradient, parameter.grad = parameter.grad, None
    parameter.data = data
    parameter.grad = None if gradient is None else gradient.to(data.dtype)


class Narrowed:
    """The FP32 parameters of a model in BF16. FP32 values of frozen ones are kept on the host.

    `read` returns a trained parameter's FP32 values; `write` receives new ones after the parameter was updated.
    """

    def __init__(
        self,
        model: nn.Module,
        trained: Iterable[nn.Parameter],
        *,
        read: Callable[[nn.Parameter], Tensor],
        write: Callable[[nn.Parameter, Tensor], None],
    ) -> None:
        self._model, self._read, self._write = model, read, write
        self.parameters = wide_parameters(model)
        known = set(trained)
        self.trained = [parameter for parameter in self.parameters if parameter in known]
        self._frozen = {p: p.detach().cpu() for p in self.parameters if p not in known}

    def apply(self, stack: ExitStack) -> None:
        """Narrow the parameters, and FP32 inputs like them unless autocast is enabled."""
        for parameter in self.parameters:
            set_storage(parameter, parameter.detach().to(NARROW))
            stack.callback(self._widen, parameter)
        self._keep_state_dicts_wide(stack)
        forward = self._model.forward

        def narrowed(value: Tensor) -> Tensor:
            autocast = torch.is_autocast_enabled(value.device.type)
            return value.to(NARROW) if value.dtype == torch.float32 and not autocast else value

        @wraps(forward)  # the Hugging Face Trainer reads a forward's signature
        def forward_narrow(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = tree_map_only(Tensor, narrowed, (args, kwargs))
            return forward(*args, **kwargs)

        stack.callback(replace_forward(self._model, forward_narrow))

    def wide(self, parameter: nn.Parameter) -> Tensor:
        frozen = self._frozen.get(parameter)
        return self._read(parameter) if frozen is None else frozen.to(parameter.device)

    def _widen(self, parameter: nn.Parameter) -> None:
        set_storage(parameter, self.wide(parameter))

    def _keep_state_dicts_wide(self, stack: ExitStack) -> None:
        """Hook each module that owns such a parameter, so that any part of the model can be saved and loaded."""
        known = set(self.parameters)

        def owned(module: nn.Module, prefix: str, state: dict[str, Any]) -> list[tuple[str, nn.Parameter]]:
            named = [(prefix + name, parameter) for name, parameter in module.named_parameters(recurse=False)]
            return [(key, parameter) for key, parameter in named if parameter in known and key in state]

        def give(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            state.update({key: self.wide(parameter) for key, parameter in owned(module, prefix, state)})

        @torch.no_grad()
        def take(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
            for key, parameter in owned(module, prefix, state):
                if state[key].shape != parameter.shape:  # PyTorch itself reports other shapes
                    continue
                if parameter in self._frozen:
                    self._frozen[parameter].copy_(state[key])
                else:
                    self._write(parameter, state[key])

        for module in self._model.modules():
            if known.intersection(module.parameters(recurse=False)):
                stack.callback(module.register_state_dict_post_hook(give).remove)
                stack.callback(module.register_load_state_dict_pre_hook(take).remove)
