"""A training as `fit` sees it: a live model, its optimizer, how to compute a loss and how to take a step.

Techniques change the model in place (its modules' `forward`, its parameters' storage) or replace the parts of a step
kept here: the contexts around a forward pass and the stepper. Parameter objects are never replaced, and names in
state dicts never change. It does not know which techniques exist.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tonnage.fit.stepping.stepper import Stepper

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from tonnage.fit.sharding.agreement import Agreement
    from tonnage.fit.sharding.ranks import Ranks

Batch = Any  # a tensor, or a nesting of them; the first dimension of each tensor is the batch
Loss = Callable[[nn.Module, Batch], Tensor]
Undo = Callable[[], None]


@dataclass
class Training:
    model: nn.Module
    optimizer: Optimizer
    loss: Loss
    sample: Batch
    device: torch.device
    stepper: Stepper
    micro_batches: int = 1
    # The weight of a micro-batch's loss in the total: a name known to `batches`, or a function of the micro-batch.
    weighting: str | Callable[[Batch], float | Tensor] = "rows"
    resampled: bool = False  # whether micro-batches may sample their own dropout masks
    # Entered around each forward pass, in this order: autocast, saved-tensor hooks.
    forward_contexts: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)
    applied: list[str] = field(default_factory=list)  # names, in order of application
    # For several ranks: the mesh, how they coordinate and, once sharded, how they step together.
    mesh: "DeviceMesh | None" = None
    agreement: "Agreement | None" = None
    ranks: "Ranks | None" = None

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        with ExitStack() as stack:
            for context in self.forward_contexts:
                stack.enter_context(context())
            yield

    def replace_stepper(self, stepper: Stepper) -> Undo:
        return set_attributes(self, stepper=stepper)

    def around_forward(self, context: Callable[[], AbstractContextManager[Any]]) -> Undo:
        """Enter a context around each forward pass, inside existing ones."""
        self.forward_contexts.append(context)
        return lambda: self.forward_contexts.remove(context)


def set_attributes(target: Any, **values: Any) -> Undo:
    """Set attributes, and return what restores them: those that hid the class's own, or were not there, are removed."""
    own = [n for n in values if n in vars(target) or (hasattr(target, n) and not hasattr(type(target), n))]
    before = {name: getattr(target, name) for name in own}
    for name, value in values.items():
        setattr(target, name, value)

    def undo() -> None:
        for name in values:
            if name in before:
                setattr(target, name, before[name])
            else:
                delattr(target, name)

    return undo
