"""Measure what a training holds apart from activations, by probing the optimizer and the host link.

Optimizer state sizes come from small probe parameters of each dtype; temporaries and speed from a larger one. The
training itself is untouched.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tonnage.fit.choose.placement import ResidentState
from tonnage.fit.moving.host import CopyLane, pinned
from tonnage.fit.stepping import parameter_step
from tonnage.fit.stepping.host_step import DeviceStep
from tonnage.fit.stepping.stepper import trained_parameters
from tonnage.fit.survey.measuring import parameter_bytes
from tonnage.fit.survey.meter import GpuMeter, adding_bytes_per_s, card_of, link_bytes_per_s
from tonnage.fit.training import Training
from tonnage.hardware.host_memory import free_host_bytes

_PROBE_BYTES = 64 << 20
_LAUNCHES, _LAUNCHED_ELEMENTS = 20, 4096
# Bytes of parameters, gradients and states that 16 cores step during a backward pass, measured on the host of an H200.
# Alone they are five times faster: kernel launches and the step compete for the same cores.
_HOST_STEP_BYTES_PER_S = 18.6e9


def find_resident_state(
    training: Training, meter: GpuMeter, blocks: dict[str, nn.Module], host_bytes: int | None
) -> ResidentState:
    optimizer = training.optimizer
    trained = list(trained_parameters(optimizer))
    inside = {id(parameter) for block in blocks.values() for parameter in block.parameters()}
    trained_in = [[p for p in block.parameters() if p.requires_grad] for block in blocks.values()]
    largest = max(parameter.numel() for parameter in trained)
    states, temporary, seconds = probe_optimizer(optimizer, meter, trained)
    if "master-weights" in training.applied:
        wide = [nn.Parameter(torch.empty(p.shape, device="meta"), requires_grad=False) for p in trained]
        states = probe_optimizer(optimizer, meter, wide)[0] + parameter_bytes(wide)
    card = card_of(meter.device)
    # The sample, library workspaces and whatever else is on the card.
    known = [*training.model.parameters(), *training.model.buffers(), *tensors_of(optimizer)]
    known += [p.grad for p in training.model.parameters() if p.grad is not None]
    known_bytes = parameter_bytes({id(tensor): tensor for tensor in known if tensor.is_cuda}.values())
    return ResidentState(
        parameters_bytes=parameter_bytes(training.model.parameters()) + parameter_bytes(training.model.buffers()),
        besides_bytes=max(0, meter.allocated_bytes - known_bytes),
        gradients_bytes=parameter_bytes(trained),
        states_bytes=states,
        outside_gradients_bytes=parameter_bytes(p for p in trained if id(p) not in inside),
        block_gradients_bytes=tuple(map(parameter_bytes, trained_in)),
        parameter_gradients_bytes=tuple(parameter_bytes([parameter]) for parameter in trained),
        step_temporary_bytes=temporary,
        optimizer_s=seconds,
        clips=training.stepper.clip_norm is not None,
        steps_one_by_one=parameter_step.why_not_one_by_one(optimizer) is None,
        host_bytes=free_host_bytes() if host_bytes is None else host_bytes,
        link_bytes_per_s=link_bytes_per_s(card) if meter.virtual else _measured_link_rate(meter.device),
        bandwidth_bytes_per_s=adding_bytes_per_s(card),
        host_step_s=5 * parameter_bytes(trained) / _HOST_STEP_BYTES_PER_S,
        stepped_apart=sum(1 for parameter in trained if not parameter_step.is_small(parameter, largest)),
        **launch_times(optimizer, meter),
    )


def launch_times(optimizer: Optimizer, meter: GpuMeter) -> dict[str, float]:
    """Return the host's launch time for one small parameter: stepped in place, and with states that are moved."""
    if parameter_step.why_not_in_pieces(optimizer) is not None:
        return {}
    probe = nn.Parameter(torch.zeros(_LAUNCHED_ELEMENTS, device=meter.device))
    small = _alone(optimizer, probe)
    steps = parameter_step.ParameterSteps(small)
    plain = steps.function
    way = DeviceStep(plain, meter.device, gpu_bytes=0, piece_bytes=_PROBE_BYTES, window_bytes=_PROBE_BYTES)
    ways: dict[str, parameter_step.StepFunction] = {"launch_s": plain, "moved_launch_s": way}
    found = {}
    with suppress(RuntimeError):  # some optimizers take sparse gradients only
        for name, steps.function in ways.items():
            small.state.clear()
            steps.step(probe, torch.zeros_like(probe))  # creates the states
            if meter.virtual:
                found[name] = meter.time(lambda: steps.step(probe, torch.zeros_like(probe))).host_s
                continue
            started = time.perf_counter()
            for _ in range(_LAUNCHES):
                steps.step(probe, torch.zeros_like(probe))
            found[name] = (time.perf_counter() - started) / _LAUNCHES
        way.finish()
    return found


def probe_optimizer(optimizer: Optimizer, meter: GpuMeter, trained: list[nn.Parameter]) -> tuple[int, int, float]:
    """Return the bytes of all states, the temporary bytes of a step, and its seconds, scaled up from a probe."""
    # foreach makes temporaries for all parameters at once, unless it is off or fused replaces it.
    group = optimizer.param_groups[0]
    on_all = "foreach" in group and group["foreach"] is not False and not group.get("fused")
    states = temporary = 0
    seconds = 0.0
    for dtype in {parameter.dtype for parameter in trained}:
        share = parameter_bytes(p for p in trained if p.dtype == dtype)
        # A matrix, for optimizers with factored states; at most as large as all parameters.
        rows = max(1, min(share, _PROBE_BYTES) // dtype.itemsize // 1024)
        probe = nn.Parameter(torch.zeros(rows, 1024, dtype=dtype, device=meter.device))
        small = _alone(optimizer, probe)
        probe.grad = torch.zeros_like(probe)
        with meter.watch() as first:
            try:
                small.step()
            except RuntimeError:  # some optimizers take sparse gradients only
                row = torch.zeros_like(probe[:1])
                probe.grad = torch.sparse_coo_tensor([[0]], row, probe.shape, check_invariants=False)  # type: ignore[arg-type]
                small.step()
        with meter.watch() as second:
            small.step()
        scale = share / parameter_bytes([probe])
        states += int(first.kept_bytes * scale)
        temporary += int(second.peak_bytes * (scale if on_all else 1))
        seconds += meter.time(small.step).gpu_s * scale
    return states, temporary, seconds


def _alone(optimizer: Optimizer, parameter: nn.Parameter) -> Optimizer:
    """Return the same optimizer over one parameter, with its own learning rate and no hooks.

    A scheduler replaces `step` with one bound to the original optimizer, so that attribute is not copied.
    """
    group = {name: value for name, value in optimizer.param_groups[0].items() if name not in ("params", "param_names")}
    # Not copy(): that would read the states, which techniques store in their own form.
    small = object.__new__(type(optimizer))
    small.__dict__ = {name: value for name, value in vars(optimizer).items() if name != "step"}
    small._optimizer_step_pre_hooks, small._optimizer_step_post_hooks = {}, {}
    small.state = type(optimizer.state)(dict)
    small.param_groups = [{**group, "params": [parameter]}]
    return small


@cache
def _measured_link_rate(device: torch.device) -> float:
    """Return the bytes per second to or from pinned memory."""
    size = 256 << 20
    host, here, lane = pinned(size, device), torch.empty(size, dtype=torch.uint8, device=device), CopyLane(device)
    lane.copy(host, here).done()
    started = time.perf_counter()
    for source, target in ((host, here), (here, host)):
        lane.copy(source, target).done()
    return 2 * size / (time.perf_counter() - started)


def tensors_of(optimizer: Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
