"""Seconds of one optimizer step on one GPU, from the states it streams through memory or the kernels it launches.

| kernel  | how it runs                                                                 |
|---------|-----------------------------------------------------------------------------|
| fused   | every state is read and written once                                        |
| foreach | one kernel per operation over all tensors: each reads and writes            |
| loop    | the same, with kernels launched tensor by tensor                            |

`data/optimizers.toml` has the numbers.
"""

from dataclasses import replace

import numpy as np

from tonnage.budget import table
from tonnage.budget.time.launches import LaunchCost
from tonnage.budget.time.layer import Busy, PassTime, busy
from tonnage.budget.training.configuration import Configuration, Quantity
from tonnage.clock.host import host_costs
from tonnage.clock.launch import Launch
from tonnage.hardware import Gpu
from tonnage.models.shape import ModelShape

# Two states of one byte, read and written.
_EIGHT_BIT_BYTES = 4
# Muon's Newton-Schulz: five iterations of three products of about the hidden size.
_NEWTON_SCHULZ_PRODUCTS = 5 * 3
_TENSORS_PER_LAYER = 9
_NANOTRON_TENSORS = 6  # two norms and four matrices
# PyTorch's multi-tensor chunk size.
_CHUNK = 65536
_CHUNKS_PER_KERNEL = 320


def update(shape: ModelShape, config: Configuration, parameters: Quantity, gpu: Gpu) -> Busy:
    """Return the work of updating `parameters` parameters on the GPU."""
    kernel = config.optimizer_kernel
    operations = table("optimizers")[config.optimizer]["passes"]
    tensors = _TENSORS_PER_LAYER * sum(len(stack.layers) for stack in shape.stacks) / config.pp
    narrow = "narrow" if config.state_bytes < 4 else "wide"
    steps = tensors if config.step_in_backward else 1
    if kernel == "fused" or len(operations) == 1:
        calls = [LaunchCost(_lists(parameters / steps, step_bytes(config), f"fused_{narrow}"), times=steps)]
    elif kernel == "foreach":
        moved = [(count * config.state_bytes, f"{form}_{narrow}") for count, form in operations]
        calls = [LaunchCost(_lists(parameters, size, form)) for size, form in moved]
    else:
        # One kernel per tensor and operation, timed by the tensor's share of the bytes.
        launches = [_each(parameters / tensors, count * config.state_bytes) for count, _ in operations]
        calls = [LaunchCost(launch, times=tensors) for launch in launches]
    if config.traits.clips and not config.step_in_backward:
        # The norm reads gradients once, scaling them reads and writes.
        calls += [LaunchCost(_lists(parameters, times * config.gradient_bytes, "foreach_wide")) for times in (1, 2)]
    if config.precision == "fp16-mixed":
        # The gradient scaler's inf check.
        calls.append(LaunchCost(_lists(parameters, 2 * config.gradient_bytes, "foreach_wide")))
    if config.optimizer == "muon":
        sides = parameters / (2 * shape.hidden**2)
        product = Launch(
            kind="matmul", name="mm", shape=(1, *(shape.hidden,) * 3), precision="bf16",
            operations=2.0 * shape.hidden**3, variant="nn-16",
        )  # fmt: skip
        calls.append(LaunchCost(product, times=_NEWTON_SCHULZ_PRODUCTS * sides))
    found = busy(calls, replace(config, compile=False), gpu, "optimizer")
    return found + Busy(host_s=steps * host_costs().optimizer_s(tensors / steps))


def gathered(shape: ModelShape, config: Configuration, parameters: Quantity, gpu: Gpu) -> Busy:
    """Return the copies around nanotron's gather of parameters: three flat ones, then one per tensor and rank."""
    if not config.traits.gathers_at_once or config.zero != 1:
        return Busy()
    ranks = config.shards
    tensors = _NANOTRON_TENSORS * sum(len(stack.layers) for stack in shape.stacks) / config.pp
    size = config.working_bytes
    calls = [
        LaunchCost(_each(parameters, 2 * size, "joined", 2), times=3),
        LaunchCost(
            _each(parameters / tensors / ranks, 2 * size, "vector", 2), operators=0, inner=1, times=tensors * ranks
        ),
    ]
    return busy(calls, replace(config, compile=False), gpu, "optimizer") * (np.asarray(ranks) > 1)


def accumulated(shape: ModelShape, config: Configuration, parameters: Quantity, gpu: Gpu) -> Busy:
    """Return the work of accumulating a micro-batch's gradients, tensor by tensor."""
    tensors = _TENSORS_PER_LAYER * sum(len(stack.layers) for stack in shape.stacks) / config.pp
    kept, made = config.gradient_bytes, config.made_bytes
    form = "mixed" if kept != made else "vector"
    added = LaunchCost(_each(parameters / tensors, 2 * kept + made, form, 3), times=tensors)
    return busy([added], config, gpu, "backward")


def sharding_copies(parameters: Quantity, config: Configuration, gpu: Gpu) -> PassTime:
    """Return the copies that FSDP2 and DeepSpeed make around their collectives in each pass.

    Those that a pipeline makes once a step are spread over its micro-batches.
    """
    if config.framework not in ("fsdp2", "deepspeed") or config.zero < 2:
        return PassTime()
    gathered = [LaunchCost(_each(parameters, 2 * config.compute_bytes, "joined", 2))]
    share = np.where(config.reduces_once, 1 / config.accumulate, 1.0)
    if not config.shards_parameters:
        gathered = []
    scattered = LaunchCost(_each(parameters, config.made_bytes + config.gradient_bytes, "joined", 2))
    again = gathered if config.zero == 3 else []
    forward, backward = busy(gathered, config, gpu), busy([scattered], config, gpu, "backward")
    return PassTime(forward * share, backward * share + busy(again, config, gpu, "backward"))


def _lists(parameters: Quantity, moved_bytes: float, variant: str) -> Launch:
    """Return a multi-tensor launch: tensors are cut into chunks, some hundreds per kernel."""
    chunks = np.ceil(parameters / _CHUNK)
    kernels = np.ceil(chunks / _CHUNKS_PER_KERNEL)
    return Launch(
        kind="optimizer", name="", shape=(parameters, chunks, np.minimum(parameters, _CHUNK)), variant=variant,
        moved_bytes=parameters * moved_bytes, kernels=kernels,
    )  # fmt: skip


def _each(elements: Quantity, moved_bytes: float, form: str = "vector", accesses: int = 1) -> Launch:
    return Launch(
        kind="elementwise", name="", shape=(elements, 1), variant=form, moved_bytes=elements * moved_bytes,
        operations=elements * accesses,
    )  # fmt: skip


def step_bytes(config: Configuration) -> float:
    """Return the bytes read and written per parameter."""
    row = table("optimizers")[config.optimizer]
    fused = config.optimizer_kernel == "fused"
    numbers: int = row["fused"] if fused else sum(count for count, _ in row["passes"])
    moved = numbers * config.state_bytes
    if config.optimizer == "adamw-8bit":
        moved += _EIGHT_BIT_BYTES
    # A 16-bit copy is written for the next forward pass.
    return moved + (2 if config.master_bytes else 0)
