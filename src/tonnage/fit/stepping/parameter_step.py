"""Step an optimizer one parameter at a time, with its own class, states and live groups.

    steps = parameter_steps(optimizer)
    steps.step(parameter, parameter.grad)   # as optimizer.step() would, for this parameter alone
    steps.finish()                          # if a step may still be in flight

Techniques replace or wrap the plain step: stochastic rounding, 8-bit states, states on the host. The caller, after or
inside backward, need not know which of them are applied. State dicts always hold the optimizer's own states.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import deepcopy
from typing import Any
from weakref import WeakKeyDictionary, proxy

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Adafactor, Muon, Optimizer

from tonnage.fit.stepping.stepper import Stepper, trained_parameters
from tonnage.fit.technique import NotApplicable
from tonnage.fit.training import Undo

State = dict[str, Any]  # an optimizer's states of one parameter; filled in its first step
Group = Mapping[str, Any]
MASTER = "master"  # the state with a parameter's FP32 master, if it has one
_SMALL_SHARE = 512  # parameters this much smaller than the largest (norms, biases) are stepped together


def is_small(parameter: Tensor, largest: int) -> bool:
    """Return whether stepping it alone would cost more time than its gradient and states are worth in memory."""
    return parameter.numel() * _SMALL_SHARE < largest


class Step(ABC):
    """Steps one tensor at a time: a parameter, or a flat slice of one."""

    converts = False  # whether its states differ from the optimizer's own, the plain ones

    @abstractmethod
    def __call__(self, parameter: Tensor, gradient: Tensor, state: State, group: Group) -> None:
        """Step with a gradient of the same shape; the first step fills `state`."""

    def step_all(self, steps: Sequence[tuple[Tensor, Tensor, State, Group]]) -> None:
        """Step several tensors, together if possible."""
        for step in steps:
            self(*step)

    def plain_state(self, parameter: Tensor, state: State) -> State:
        """Return the optimizer's own states: tensors in the shape of the parameter, on any device."""
        return state

    def own_state(self, parameter: Tensor, plain: State, group: Group) -> State:
        """Convert plain states to this step's own; keeps no reference to them."""
        counts_on_device = group.get("fused") or group.get("capturable")
        return {
            name: value.to(parameter.device, copy=True)
            if isinstance(value, Tensor) and (value.dim() or counts_on_device)
            else deepcopy(value)
            for name, value in plain.items()
        }


def why_not_one_by_one(optimizer: Optimizer) -> str | None:
    """Return why the parameters of this optimizer cannot be stepped one at a time, or None."""
    name = type(optimizer).__name__
    if isinstance(optimizer, LBFGS):
        return "LBFGS searches along a line through all parameters at once"
    if not _plain_step(type(optimizer)).__module__.startswith("torch.optim."):
        return f"the step of {name} is not one of torch.optim's and may count on seeing all parameters at once"
    if getattr(optimizer, "_optimizer_step_pre_hooks", None):
        return "a hook before its step (that clips by value, say) wants the gradients of all parameters"
    return None


def why_not_in_pieces(optimizer: Optimizer) -> str | None:
    """Return why a parameter of this optimizer cannot be stepped piece by piece, or None."""
    if isinstance(optimizer, Adafactor | Muon):
        return f"{type(optimizer).__name__} needs the whole matrix of a parameter for each of its elements"
    return why_not_one_by_one(optimizer)


def _plain_step(optimizer_class: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """Return the class's step without its hooks, which belong to the step of all parameters."""
    step = optimizer_class.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


class PlainStep(Step):
    """The optimizer's own step on one or more tensors, through a copy of the optimizer that holds only these."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer: Optimizer = proxy(optimizer)

    def __call__(self, parameter: Tensor, gradient: Tensor, state: State, group: Group) -> None:
        self.step_all([(parameter, gradient, state, group)])

    @torch.no_grad()
    def step_all(self, steps: Sequence[tuple[Tensor, Tensor, State, Group]]) -> None:
        """Step several tensors at once, in a few kernels if the optimizer has foreach or fused ones."""
        kind = self._optimizer.__class__
        few = object.__new__(kind)
        few.__dict__.update(self._optimizer.__dict__)
        few.state = defaultdict(dict, {parameter: state for parameter, _, state, _ in steps})
        groups = {id(group): {**group, "params": []} for _, _, _, group in steps}
        few.param_groups = list(groups.values())
        try:
            for parameter, gradient, _, group in steps:
                parameter.grad = gradient
                groups[id(group)]["params"].append(parameter)
            _plain_step(kind)(few)
        finally:
            for parameter, *_ in steps:
                parameter.grad = None


class ParameterSteps:
    """Steps the parameters of one optimizer, one at a time."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer: Optimizer = proxy(optimizer)
        self._group_of: dict[nn.Parameter, int] = {}
        self._finishers: list[Callable[[], None]] = []
        self._bringers: list[Callable[[nn.Parameter], AbstractContextManager[None]]] = []
        self.function: Step = PlainStep(optimizer)
        # Parameters with an FP32 master, a state that state dicts leave out.
        self.with_master: list[nn.Parameter] = []

    def step(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        states = self.optimizer.state
        with self.at_hand(parameter):
            self.function(parameter, gradient, states[parameter], self.group(parameter))
        if not states[parameter]:  # plain SGD keeps nothing, and its state dict says so
            del states[parameter]

    def step_all(self, parameters: Sequence[nn.Parameter]) -> None:
        """Step parameters with the gradients they have, together if nothing else has to happen."""
        states, taken = self.optimizer.state, []
        for parameter in parameters:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            if self._bringers:
                self.step(parameter, gradient)
            else:
                taken.append((parameter, gradient, states[parameter], self.group(parameter)))
        if taken:
            self.function.step_all(taken)
        for parameter, _, state, _ in taken:
            if not state:
                del states[parameter]

    def finish(self) -> None:
        """Wait for steps in flight; afterwards parameters and states are updated."""
        for finish in self._finishers:
            finish()

    @contextmanager
    def at_hand(self, parameter: nn.Parameter) -> Iterator[None]:
        """Bring the parameter's values to its device inside this context, wherever they are kept otherwise."""
        with ExitStack() as stack:
            for bring in self._bringers:
                stack.enter_context(bring(parameter))
            yield
            if self._bringers:  # the values that leave must be the new ones
                self.finish()

    def bring_by(self, bring: Callable[[nn.Parameter], AbstractContextManager[None]]) -> Undo:
        """Enter this context around the step of each parameter."""
        self._bringers.append(bring)
        return lambda: self._bringers.remove(bring)

    def group(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the live group; never cached, since loading a state dict replaces the groups."""
        if parameter not in self._group_of:
            groups = self.optimizer.param_groups
            self._group_of = {member: index for index, group in enumerate(groups) for member in group["params"]}
        return self.optimizer.param_groups[self._group_of[parameter]]

    def master(self, parameter: nn.Parameter) -> Tensor:
        self.finish()
        master: Tensor = self.function.plain_state(parameter, self.optimizer.state[parameter])[MASTER]
        return master.to(parameter.device)

    def replace(self, function: Step, *, finish: Callable[[], None] | None = None) -> Undo:
        """Step with `function`, which may call the previous one; undo in reverse order."""
        before = self.function
        with ExitStack() as stack:
            # Convert existing states one parameter at a time, or leave all unchanged.
            with ExitStack() as unchanged:
                unchanged.callback(setattr, self, "function", before)
                for parameter in [*self.optimizer.state]:
                    self._convert([parameter], before, function)
                    unchanged.callback(self._convert, [parameter], function, before)
                unchanged.pop_all()
            self.function = function
            stack.callback(lambda: self._convert([*self.optimizer.state], function, before))
            if function.converts and not before.converts:
                keep_state_dicts_plain(self, stack)
            if finish is not None:
                self._finishers.append(finish)
                stack.callback(self._finishers.remove, finish)
                stack.callback(finish)
            return stack.pop_all().close

    @torch.no_grad()
    def _convert(self, parameters: Sequence[Any], before: Step, after: Step) -> None:
        """Step with `after` from now on, which takes over the states of these parameters."""
        self.function, states = after, self.optimizer.state
        for parameter in parameters if before.converts or after.converts else ():
            with self.at_hand(parameter):
                plain = before.plain_state(parameter, states[parameter])
                if plain:
                    states[parameter] = after.own_state(parameter, plain, self.group(parameter))
                else:
                    del states[parameter]


def keep_state_dicts_plain(steps: ParameterSteps, stack: ExitStack) -> None:
    """Make `optimizer.state_dict()` return plain states and `load_state_dict` accept them.

    States are removed from what is loaded before the optimizer sees it: it would move all of them to the device.
    """
    loaded: dict[nn.Parameter, State] = {}

    def members(groups: list[dict[str, Any]]) -> list[Any]:
        return [member for group in groups for member in group["params"]]

    def give(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        parameters, plain = members(optimizer.param_groups), {}
        for index, state in state_dict["state"].items():
            with steps.at_hand(parameters[index]):
                plain[index] = {**steps.function.plain_state(parameters[index], state)}
            plain[index].pop(MASTER, None)
        return {**state_dict, "state": {index: state for index, state in plain.items() if state}}

    def set_aside(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        parameter_of = dict(zip(members(state_dict["param_groups"]), members(optimizer.param_groups), strict=False))
        loaded.clear()
        loaded.update({parameter_of[i]: state for i, state in state_dict["state"].items() if i in parameter_of})
        for parameter in steps.with_master:
            loaded[parameter] = {**loaded.get(parameter, {}), MASTER: steps.master(parameter)}
        return {**state_dict, "state": {}}

    @torch.no_grad()
    def take(optimizer: Optimizer) -> None:
        for parameter, plain in loaded.items():
            dtype = torch.float32 if MASTER in plain else parameter.dtype
            if dtype.is_floating_point:  # as torch loads them: in the parameter's dtype, except counters
                plain = {n: v.to(dtype) if isinstance(v, Tensor) and n != "step" else v for n, v in plain.items()}
            with steps.at_hand(parameter):
                optimizer.state[parameter] = steps.function.own_state(parameter, plain, steps.group(parameter))
        loaded.clear()

    stack.callback(steps.optimizer.register_state_dict_post_hook(give, prepend=True).remove)
    stack.callback(steps.optimizer.register_load_state_dict_pre_hook(set_aside).remove)
    stack.callback(steps.optimizer.register_load_state_dict_post_hook(take).remove)


_steps_of: WeakKeyDictionary[Optimizer, ParameterSteps] = WeakKeyDictionary()


def parameter_steps(optimizer: Optimizer) -> ParameterSteps:
    """Return the optimizer's only instance, created on first use."""
    if optimizer not in _steps_of:
        reason = why_not_one_by_one(optimizer)
        if reason is not None:
            raise NotApplicable(
                f"The parameters of this optimizer cannot be stepped one at a time: {reason}.",
                hint="Use AdamW or another optimizer of torch.optim, or leave this technique out.",
            )
        _steps_of[optimizer] = ParameterSteps(optimizer)
    return _steps_of[optimizer]


class OneByOneStepper(Stepper):
    """Steps each parameter alone and frees its gradient."""

    def __init__(self, before: Stepper) -> None:
        super().__init__(before.optimizer, clip_norm=before.clip_norm)
        self.steps = parameter_steps(before.optimizer)

    def clip(self, clip_norm: float) -> None:
        parameters = self.with_gradients()
        if parameters:
            self.gradient_norm = gradient_norm([p.grad for p in parameters if p.grad is not None])
            nn.utils.clip_grads_with_norm_(parameters, clip_norm, self.gradient_norm)

    def update(self) -> None:
        self.step_gradients()
        self.steps.finish()
        # No gradient is left: this only runs the step hooks and tells schedulers that a step was taken.
        self.optimizer.step()

    def step_gradients(self) -> None:
        for parameter in self.with_gradients():
            self.step(parameter)

    def step(self, parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        self.steps.step(parameter, gradient)

    def with_gradients(self) -> list[nn.Parameter]:
        return [parameter for parameter in trained_parameters(self.optimizer) if parameter.grad is not None]


def gradient_norm(gradients: list[Tensor]) -> Tensor:
    """Return the total norm, summed in FP32: PyTorch's own norm of BF16 gradients has three digits."""
    wide = torch.promote_types(torch.float32, gradients[0].dtype)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0, dtype=wide)))
    return norm
