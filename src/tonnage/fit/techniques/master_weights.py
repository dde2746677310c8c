"""Parameters and gradients in BF16, with an FP32 master copy of each parameter that the optimizer steps.

The master is stored with the optimizer's other states and moves with them; after a step it is rounded into the
parameter. State dicts of model and optimizer are those of the FP32 model.
"""

from collections import defaultdict
from contextlib import ExitStack
from copy import deepcopy
from inspect import signature
from weakref import proxy

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tonnage.fit.stepping.narrow import Narrowed, why_not_narrow, wide_parameters
from tonnage.fit.stepping.parameter_step import (
    MASTER,
    Group,
    OneByOneStepper,
    State,
    Step,
    parameter_steps,
    why_not_in_pieces,
    why_not_one_by_one,
)
from tonnage.fit.stepping.stepper import trained_parameters
from tonnage.fit.technique import Technique
from tonnage.fit.training import Training

_PIECE_ELEMENTS = 2**26  # 256 MiB per FP32 temporary of a step


class MasterStep(Step):
    """Steps a parameter's master, if any, with the inner step and rounds it into the parameter.

    The master is among the plain states, and so moves with them; state dicts leave it out.
    """

    converts = True

    def __init__(self, optimizer: Optimizer, inner: Step, *, piece_elements: int | None) -> None:
        self._optimizer: Optimizer = proxy(optimizer)
        self._inner = inner
        self._piece_elements = piece_elements  # None if a step needs the whole parameter

    def own_state(self, parameter: Tensor, plain: State, group: Group) -> State:
        rest = {name: value for name, value in plain.items() if name != MASTER}
        if MASTER not in plain:
            return self._inner.own_state(parameter, rest, group)
        master = plain[MASTER].to(parameter.device, torch.float32)
        if master.untyped_storage().nbytes() != master.nbytes:  # release the rest of that storage
            master = master.clone()
        if rest or isinstance(parameter, nn.Parameter):
            return {**self._inner.own_state(parameter, rest, group), MASTER: master}
        # Steps that keep states in pieces must know all of them before the first step creates them.
        kind = self._optimizer.__class__
        begin = getattr(kind, "_init_group", None)
        if begin is None:
            return {MASTER: master}
        one = object.__new__(kind)
        one.__dict__.update(self._optimizer.__dict__)
        one.state = defaultdict(dict)
        master.grad = torch.zeros_like(master)
        try:
            begin(one, {**group, "params": [master]}, *([] for _ in range(len(signature(begin).parameters) - 2)))
        finally:
            master.grad = None
        return {**one.state[master], MASTER: master}

    @torch.no_grad()
    def __call__(self, parameter: Tensor, gradient: Tensor, state: State, group: Group) -> None:
        master = state.pop(MASTER, None)
        if master is None:
            self._inner(parameter, gradient, state, group)
            return
        try:
            self._step(master, gradient, state, group)
            parameter.copy_(master)
        finally:
            state[MASTER] = master

    def _step(self, master: Tensor, gradient: Tensor, state: State, group: Group) -> None:
        count, most = master.numel(), self._piece_elements
        contiguous = all(v.is_contiguous() for v in (master, gradient, *state.values()) if isinstance(v, Tensor))
        if most is None or count <= most or not contiguous:
            self._inner(master, gradient.float(), state, group)
            return
        before = dict(state)
        for start in range(0, count, most):
            piece = slice(start, min(start + most, count))
            # Each piece gets slices of states as large as the parameter, and a copy of the others (step count).
            given = {
                name: value.view(-1)[piece] if isinstance(value, Tensor) and value.numel() == count else deepcopy(value)
                for name, value in before.items()
            }
            kept = dict(given)
            self._inner(master.view(-1)[piece], gradient.view(-1)[piece].float(), kept, group)
            # New states are written into whole ones, counters replaced.
            for name, value in kept.items():
                if not isinstance(value, Tensor) or value.shape != (piece.stop - piece.start,):
                    state[name] = value
                elif value is not given.get(name):
                    whole = state.setdefault(name, torch.empty_like(master, dtype=value.dtype))
                    whole.view(-1)[piece] = value


class MasterWeights(Technique, name="master-weights"):
    def why_not(self, training: Training) -> str | None:
        if not set(wide_parameters(training.model)).intersection(trained_parameters(training.optimizer)):
            return "no trained parameter is FP32, so there is nothing to narrow"
        return why_not_narrow(training.model) or why_not_one_by_one(training.optimizer)

    def place(self, training: Training, stack: ExitStack) -> None:
        optimizer, steps = training.optimizer, parameter_steps(training.optimizer)

        def write(parameter: nn.Parameter, values: Tensor) -> None:
            states = steps.optimizer.state
            if isinstance(steps.function, MasterStep):
                states[parameter][MASTER].copy_(values)
                return
            steps.finish()
            plain = steps.function.plain_state(parameter, states[parameter])
            plain[MASTER] = values.to(torch.float32, copy=True)
            states[parameter] = steps.function.own_state(parameter, plain, steps.group(parameter))

        def take_masters_away() -> None:
            steps.with_master.clear()
            states = steps.optimizer.state  # another one once a state dict was loaded
            for parameter in narrowed.trained:
                del states[parameter][MASTER]
                if not states[parameter]:
                    del states[parameter]

        trained = trained_parameters(optimizer)
        narrowed = Narrowed(training.model, trained, read=steps.master, write=write)
        whole = why_not_in_pieces(optimizer) is not None
        function = MasterStep(optimizer, steps.function, piece_elements=None if whole else _PIECE_ELEMENTS)
        steps.with_master += narrowed.trained
        for parameter in narrowed.trained:
            optimizer.state[parameter][MASTER] = parameter.detach()
        stack.callback(take_masters_away)
        stack.callback(steps.replace(function))
        narrowed.apply(stack)
        stack.callback(training.replace_stepper(OneByOneStepper(training.stepper)))
