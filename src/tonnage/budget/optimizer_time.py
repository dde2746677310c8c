"""Seconds of one optimizer step on one GPU: the states that it streams through the card, or the card's own pace.

| kernel  | how it runs                                                                 |
|---------|-----------------------------------------------------------------------------|
| fused   | every state read and written once                                           |
| foreach | one kernel an operation over all tensors: every operation reads and writes  |
| loop    | the same, and each tensor's kernels are issued one by one                   |
"""

import numpy as np

from tonnage.budget.configuration import Configuration, Quantity
from tonnage.budget.frameworks import master_bytes, state_bytes
from tonnage.budget.roofline import Roofline
from tonnage.models.shape import ModelShape

# Numbers of a parameter, its gradient and its states that are read or written: in one pass, and operation by operation.
_FUSED_NUMBERS = {
    "sgd": 3,
    "momentum": 5,
    "adam": 7,
    "adamw": 7,
    "lion": 5,
    "muon": 5,
    "adafactor": 12,
    "adamw-8bit": 3,
}
_PASSED_NUMBERS = {
    "sgd": 3,
    "momentum": 8,
    "adam": 18,
    "adamw": 20,
    "lion": 12,
    "muon": 8,
    "adafactor": 12,
    "adamw-8bit": 3,
}
# Two states of one byte, read and written.
_EIGHT_BIT_BYTES = 4
# Muon's Newton-Schulz: five iterations of two products with a matrix and one of its square, of about its hidden side.
_NEWTON_SCHULZ_OPERATIONS = 5 * 6
_OPERATIONS_PER_TENSOR = 12
_TENSORS_PER_LAYER = 9
# Kernels that a layer's forward issues: what the host's pace is measured over.
_KERNELS_PER_LAYER = 40


def optimizer_s(shape: ModelShape, configuration: Configuration, line: Roofline, parameters: Quantity) -> Quantity:
    """To update that many parameters on the GPU."""
    shares = line.shares
    streamed_s = parameters * step_bytes(configuration) / (line.gpu.bandwidth_bytes_per_s * shares.optimizer_ceiling)
    cycles = line.gpu.sm_count * line.gpu.clock_mhz * 1e6
    paced_s = parameters / (shares.optimizer_parameters_per_sm_clock * cycles)
    seconds = np.maximum(streamed_s, paced_s)
    if configuration.optimizer == "muon":
        seconds = seconds + line.matmul_s(shape.hidden, shape.hidden, shape.hidden) * (
            _NEWTON_SCHULZ_OPERATIONS * parameters / (2 * shape.hidden**2)
        )
    if configuration.optimizer_kernel == "loop":
        tensors = _TENSORS_PER_LAYER * sum(len(stack.layers) for stack in shape.stacks)
        issue_s = shares.host_forward_s_per_layer / _KERNELS_PER_LAYER
        seconds = np.maximum(seconds, tensors * _OPERATIONS_PER_TENSOR * issue_s / configuration.pp)
    return seconds


def step_bytes(configuration: Configuration) -> float:
    """Read and written for one parameter."""
    fused = configuration.optimizer_kernel == "fused"
    numbers = (_FUSED_NUMBERS if fused else _PASSED_NUMBERS)[configuration.optimizer]
    moved = numbers * state_bytes(configuration)
    if configuration.optimizer == "adamw-8bit":
        moved += _EIGHT_BIT_BYTES
    # A 16-bit copy is written for the next forward pass.
    return moved + (2 if master_bytes(configuration) else 0)
