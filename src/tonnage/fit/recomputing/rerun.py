"""Run a module again in backward instead of saving its activations.

Forward saves only the module's inputs, through autograd's saved tensors, so that hooks see them. Backward reruns it
with the same random numbers and autocast, and passes each parameter's gradient to autograd once, complete.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from tonnage.fit.recomputing.remembered import (
    Generators,
    Slot,
    States,
    given_generators,
    held_generators,
    put_back,
    same_states,
)
from tonnage.fit.recomputing.replay import Replayer, Stash
from tonnage.fit.technique import NotApplicable

Forward = Callable[..., Any]
Gradients = Sequence[Tensor | None]
Ends = Sequence[GradientEdge | None]
_TENSOR = object()  # placeholder for a tensor removed from a nesting


@dataclass(frozen=True)
class Surroundings:
    """What a forward pass reads beyond its arguments: autocast, random generators and module state."""

    casts: tuple[tuple[str, torch.dtype, bool], ...]
    generators: Generators
    random: States  # of the generators before the forward; empty if it used none
    slots: tuple[Slot, ...] = ()
    remembered: tuple[Any, ...] = ()  # values of the slots before the forward

    @classmethod
    def now(
        cls, leaves: Sequence[Any], parameters: Iterable[Tensor], held: Iterable[Any], slots: Sequence[Slot] = ()
    ) -> "Surroundings":
        """Capture the state before a call with these leaves, by a module that holds these generators."""
        # The device of the first CUDA tensor, else of the first tensor.
        devices = [leaf.device for leaf in (*leaves, *parameters) if isinstance(leaf, Tensor)] or [torch.device("cpu")]
        device = next((device for device in devices if device.type == "cuda"), devices[0])
        kinds = dict.fromkeys((device.type, "cpu"))
        casts = tuple((kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds)
        generators = Generators(device, [*held, *given_generators(leaves)])
        return cls(casts, generators, generators.states(), tuple(slots), tuple(slot.saved() for slot in slots))

    def without_unused_random(self) -> "Surroundings":
        """Drop the RNG states if the forward, which must have run, did not advance them."""
        return replace(self, random=()) if same_states(self.random, self.generators.states()) else self

    @contextmanager
    def again(self) -> Iterator[None]:
        with ExitStack() as stack:
            for kind, dtype, enabled in self.casts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            if self.random:
                stack.callback(self.generators.set, self.generators.states())
                self.generators.set(self.random)
            stack.enter_context(put_back(self.slots, self.remembered))
            yield


@dataclass(eq=False)
class ForwardCall:
    """One call of a forward. Tensors that need a gradient are removed from `leaves`; `run` fills them in."""

    forward: Forward
    leaves: list[Any]
    spec: TreeSpec
    places: tuple[int, ...]
    parameters: tuple[nn.Parameter, ...]
    surroundings: Surroundings
    stash: Stash | None = None  # stored outputs; None if everything runs again
    output_leaves: list[Any] = field(default_factory=list)  # `_TENSOR` in place of tensors
    output_spec: TreeSpec | None = None

    def run(self, inputs: Sequence[Tensor], leaves: Sequence[Any] | None = None) -> tuple[Tensor, ...]:
        """Return the tensors among the outputs. `leaves` may replace the call's own."""
        filled = list(self.leaves if leaves is None else leaves)
        for place, tensor in zip(self.places, inputs, strict=True):
            filled[place] = tensor
        args, kwargs = tree_unflatten(filled, self.spec)
        outputs, self.output_spec = tree_flatten(self.forward(*args, **kwargs))
        self.output_leaves = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in outputs]
        return tuple(leaf for leaf in outputs if isinstance(leaf, Tensor))

    def outputs(self, tensors: Sequence[Tensor]) -> Any:
        """Rebuild the forward's return value around these tensors."""
        given = iter(tensors)
        leaves = [next(given) if leaf is _TENSOR else leaf for leaf in self.output_leaves]
        assert self.output_spec is not None
        return tree_unflatten(leaves, self.output_spec)


class Rerun:
    """Replaces a module's forward. With gradients disabled it is that forward.

    With a `replayer`, saved operators and those that backward does not need are skipped. Pass None if the forward is
    compiled, since its operators cannot be observed. `slots` are what the forward changes in its modules.
    """

    def __init__(
        self, module: nn.Module, forward: Forward, replayer: Replayer | None, slots: Sequence[Slot] = ()
    ) -> None:
        self.module = module
        self.forward = forward
        self.replayer = replayer
        self.slots = slots
        self.differs: str | None = None  # why the last call could not store the chosen operators
        self._generators = list(held_generators(module))
        self._whole = Replayer({}) if replayer is None or replayer.kept else replayer
        self._checked = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or holds_tokens(self.module, args, kwargs):
            return self.forward(*args, **kwargs)
        leaves, spec = tree_flatten(without_cache(args, kwargs))
        places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad)
        parameters = tuple(p for p in self.module.parameters() if p.requires_grad)
        if not places and not parameters:
            return self.forward(*args, **kwargs)
        inputs = [leaves[place] for place in places]
        surroundings = Surroundings.now(leaves, parameters, self._generators, self.slots)
        bare = [None if i in places else leaf for i, leaf in enumerate(leaves)]
        call = ForwardCall(self.forward, bare, spec, places, parameters, surroundings)
        return call.outputs(_Rerun.apply(self, call, *inputs, *parameters))

    def first(self, call: ForwardCall, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the forward pass, saving only what the replayer stores."""
        if self.replayer is None or not self.replayer.kept:
            return call.run(inputs)
        fresh = [tensor.detach().requires_grad_() for tensor in inputs]
        outputs, stash = self.replayer.first(lambda: call.run(fresh), call.surroundings.generators.torch_states)
        # If the operators differ from the profiled ones, this call reruns whole.
        self.differs = stash.differs
        call.stash = None if stash.differs else stash
        return outputs

    def differentiate(self, call: ForwardCall, inputs: Sequence[Tensor], gradients: Gradients) -> Gradients:
        """Return gradients of the inputs, then of the parameters."""
        fresh = [tensor.detach().requires_grad_() for tensor in inputs]
        ends = self.again(call, fresh, call.leaves)
        if call.stash is not None and not torch._C._autograd._get_current_graph_task_keep_graph():
            # From here on only the graph holds the stored outputs, and frees them as backward proceeds.
            call.stash.outputs.clear()
        return self.gradients(ends, gradients, [*fresh, *call.parameters])

    def again(self, call: ForwardCall, inputs: Sequence[Tensor], leaves: Sequence[Any]) -> Ends:
        """Rerun and return the outputs' gradient edges. The outputs are freed: backward does not read them."""
        surroundings, run = call.surroundings, partial(call.run, inputs, leaves)
        with torch.enable_grad():
            if self.replayer is None:
                with surroundings.again():
                    outputs = run()
            else:
                replayer = self._whole if call.stash is None else self.replayer
                # The key of a plan: shapes of all tensors, and which of them require a gradient.
                tensors = [leaf for leaf in (*inputs, *leaves) if isinstance(leaf, Tensor)]
                layouts = ((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)
                shapes = (*layouts, call.places, *map(id, call.parameters))
                stash = call.stash or Stash()
                outputs = replayer.again(run, shapes, stash, surroundings.generators.set, surroundings.again)
        if not self._checked:
            self._check_reads_only(outputs, {id(tensor) for tensor in (*inputs, *call.parameters)})
            self._checked = True
        return [get_gradient_edge(output) if output.requires_grad else None for output in outputs]

    def gradients(self, ends: Ends, gradients: Gradients, wanted: Sequence[Tensor]) -> Gradients:
        pairs = [(e, g) for e, g in zip(ends, gradients, strict=True) if e is not None and g is not None]
        if not pairs:
            return [None] * len(wanted)
        edges, starts = zip(*pairs, strict=True)
        return torch.autograd.grad(edges, wanted, starts, allow_unused=True)

    def _check_reads_only(self, outputs: Sequence[Tensor], known: set[int]) -> None:
        """Reject a parameter from elsewhere: it would silently lose this module's share of its gradient."""
        waiting = [output.grad_fn for output in outputs]
        seen = set[Node]()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if hasattr(node, "variable") and id(node.variable) not in known:
                raise NotApplicable(
                    f"{type(self.module).__name__} reads a tensor of shape {list(node.variable.shape)} that needs a gradient "
                    "but is neither its argument nor its own parameter: running it again would lose that gradient.",
                    hint="Keep this block as it is: leave its name out of the recompute modes.",
                )
            waiting += [after for after, _ in node.next_functions]


class _Rerun(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rerun: Rerun, call: ForwardCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.rerun, ctx.call = rerun, call
        ctx.set_materialize_grads(False)
        inputs = tensors[: len(call.places)]
        # Autocast's cache is off: casts made without gradients could not be differentiated through later.
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            outputs = rerun.first(call, inputs)
        finally:
            torch.set_autocast_cache_enabled(cached)
        call.surroundings = call.surroundings.without_unused_random()
        ctx.save_for_backward(*inputs)
        # If a block returned an argument that needs no gradient, autograd would make it an output of this function.
        given = {id(leaf) for leaf in call.leaves}
        constant = (o for o in outputs if id(o) in given or not (o.is_floating_point() or o.is_complex()))
        ctx.mark_non_differentiable(*constant)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return (None, None, *ctx.rerun.differentiate(ctx.call, ctx.saved_tensors, gradients))


class GraphRerun(Rerun):
    """Replaces a module's forward, as `Rerun` does, while autograd keeps the graph of the first run.

    This is for modules whose gradients flow through more than arguments and outputs: router logits that a hook
    collects, an auxiliary loss in an attribute, a parameter of another module. Those are nodes of the first graph;
    only what the nodes saved is recomputed. It cannot save the outputs of chosen operators, so it has no replayer.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or holds_tokens(self.module, args, kwargs):
            return self.forward(*args, **kwargs)
        args, kwargs = without_cache(args, kwargs)
        leaves = tree_leaves((args, kwargs))
        surroundings = Surroundings.now(leaves, self.module.parameters(), self._generators, self.slots)
        is_first = True

        def run(*args: Any, **kwargs: Any) -> Any:
            with nullcontext() if is_first else surroundings.again():
                return self.forward(*args, **kwargs)

        # Stopping early would leave modules between one hook and the next.
        outputs = checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, early_stop=False, **kwargs)
        is_first, surroundings = False, surroundings.without_unused_random()
        return outputs


def without_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments without a KV cache, which the second run would fill again."""
    named = {name: None if _is_cache(arg) else arg for name, arg in kwargs.items()}
    if named.get("use_cache"):
        named["use_cache"] = False
    return tuple(None if _is_cache(arg) else arg for arg in args), named


def _is_cache(value: object) -> bool:
    caches = sys.modules.get("transformers.cache_utils")
    return caches is not None and isinstance(value, caches.Cache)


def holds_tokens(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a cache holds earlier tokens, which the block must see: it then runs plainly."""
    caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
    if not caches:
        return False
    indices = (getattr(child, "layer_idx", None) for child in module.modules())
    layer = next((index for index in indices if isinstance(index, int)), 0)
    return any(cache.get_seq_length(layer) > 0 for cache in caches)
