"""Run a module again in backward while autograd keeps the graph of its first run.

For modules that gradients enter or leave by other ways than arguments and outputs: router logits that a hook collects,
an auxiliary loss in an attribute, a parameter of another module. All of those are nodes of the graph that was made first;
only what the nodes saved is made a second time. It cannot keep the outputs of chosen operators, as `Rerun` can.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tonnage.fit.recomputing.generators import given_generators, held_generators
from tonnage.fit.recomputing.remembered import Slot
from tonnage.fit.recomputing.rerun import Forward, Surroundings, device_of, holds_tokens, without_cache


class GraphRerun:
    """Takes the place of a module's forward. Without gradients to compute it is that forward."""

    def __init__(self, module: nn.Module, forward: Forward, slots: Sequence[Slot] = ()) -> None:
        self.module = module
        self.forward = forward
        self.slots = slots
        self._generators = list(held_generators(module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or holds_tokens(self.module, args, kwargs):
            return self.forward(*args, **kwargs)
        args, kwargs = without_cache(args, kwargs)
        leaves = tree_leaves((args, kwargs))
        own = [*self._generators, *given_generators(leaves)]
        again = _Again(Surroundings.now(device_of((*leaves, *self.module.parameters())), own, self.slots))
        outputs = checkpoint(
            self.forward,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), again),
            early_stop=False,  # which would leave modules in the middle, between one hook and another
            **kwargs,
        )
        again.surroundings = again.surroundings.without_unused_random()
        return outputs


class _Again(AbstractContextManager[None]):
    """May be entered many times: once for each backward pass over the graph."""

    def __init__(self, surroundings: Surroundings) -> None:
        self.surroundings = surroundings
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(self.surroundings.again())

    def __exit__(self, *failure: object) -> None:
        self._stack.close()
