"""Parameters and optimizer states in BF16 only, stored with stochastic rounding so that small updates are not lost.

No FP32 copy exists beyond a few values in registers. State dicts keep the dtypes that the model had.
"""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from tonnage.fit.stepping.narrow import NARROW, Narrowed, why_not_narrow, wide_parameters
from tonnage.fit.stepping.parameter_step import OneByOneStepper, State, parameter_steps, why_not_one_by_one
from tonnage.fit.stepping.stepper import trained_parameters
from tonnage.fit.stepping.stochastic import StochasticStep
from tonnage.fit.technique import Technique
from tonnage.fit.training import Training


class StochasticBf16(Technique, name="stochastic-bf16"):
    def why_not(self, training: Training) -> str | None:
        optimizer = training.optimizer
        if not isinstance(optimizer, Adam | SGD):
            return f"the rounding is built into Adam, AdamW and SGD, and this is {type(optimizer).__name__}"
        for setting in ("amsgrad", "differentiable"):
            if any(group.get(setting) for group in optimizer.param_groups):
                return f"{type(optimizer).__name__} was made with {setting}=True, which the rounding step does not know"
        if not {p.dtype for p in trained_parameters(optimizer)} & {torch.float32, NARROW}:
            return "no trained parameter is FP32 or BF16"
        wide = wide_parameters(training.model)
        if wide and "weight-streaming" in training.applied:
            return "weights that are streamed lie on the host in FP32; make the model BF16 first"
        return (why_not_narrow(training.model) if wide else None) or why_not_one_by_one(optimizer)

    def place(self, training: Training, stack: ExitStack) -> None:
        steps = parameter_steps(training.optimizer)
        narrowed = Narrowed(
            training.model,
            trained_parameters(training.optimizer),
            read=lambda parameter: parameter.detach().float(),
            write=lambda parameter, values: None,  # the parameter itself, as torch loads it, is all there is
        )
        narrowed.apply(stack)
        _narrow_states(training.optimizer, set(narrowed.trained), stack)
        stack.callback(steps.replace(StochasticStep(steps.function)))
        stack.callback(training.replace_stepper(OneByOneStepper(training.stepper)))


def _narrow_states(optimizer: Optimizer, known: set[nn.Parameter], stack: ExitStack) -> None:
    """Hold the states of these parameters in BF16; state dicts and the undo return FP32."""

    def cast(dtype: torch.dtype) -> None:
        for parameter, state in optimizer.state.items():
            if parameter in known:
                optimizer.state[parameter] = _cast(state, dtype)

    def widen(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        members = [member for group in optimizer.param_groups for member in group["params"]]
        states = state_dict["state"]
        wide = {i: _cast(state, torch.float32) if members[i] in known else state for i, state in states.items()}
        return {**state_dict, "state": wide}

    def undo() -> None:
        cast(torch.float32)
        # A fused optimizer expects step counts on the device.
        for group in optimizer.param_groups:
            if group.get("fused") or group.get("capturable"):
                for parameter in group["params"]:
                    state = optimizer.state.get(parameter, {})
                    if "step" in state:
                        state["step"] = state["step"].to(parameter.device)

    cast(NARROW)
    stack.callback(undo)
    stack.callback(optimizer.register_state_dict_post_hook(widen).remove)


def _cast(state: State, dtype: torch.dtype) -> State:
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() and name != "step" else value
        for name, value in state.items()
    }
