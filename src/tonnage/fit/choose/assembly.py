"""Turn a solution into techniques, and list the techniques that always pay."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import torch

from tonnage.fit.choose.choosing import PIECE_BYTES
from tonnage.fit.choose.placement import HOST_GRADIENTS, STEP_IN_BACKWARD, WINDOW_BYTES, ResidentState
from tonnage.fit.choose.solver import Solution
from tonnage.fit.stepping.stepper import trained_parameters
from tonnage.fit.survey.survey import BLOCK, BLOCK_OFFLOAD, KEEP, OFFLOAD, Survey, recompute_mode
from tonnage.fit.technique import Technique, technique_class
from tonnage.fit.techniques.activation_offload import ActivationOffload
from tonnage.fit.techniques.host_states import HostStates
from tonnage.fit.techniques.micro_batches import MicroBatches
from tonnage.fit.techniques.recompute import Recompute
from tonnage.fit.techniques.step_in_backward import StepInBackward
from tonnage.fit.training import Training

# Cheapest first. Each saves memory, time or both on every model that supports it.
ALWAYS_PAYING = ("allocator", "fused-attention", "chunked-loss", "fp8", "autocast", "compile")
# If nothing fits, in this order: FP32 parameters among the states, which can be on the host; 8-bit states, if allowed;
# tiles for long sequences, which cost a second forward pass of what is tiled.
MASTERS, COARSE_STATES, TILES = (
    ("master-weights",),
    ("stochastic-bf16", "eight-bit-states"),
    ("tiled-mlp", "tiled-norm"),
)
# Bytes of logits at a time: small next to the rest.
_LARGEST_CHUNK_BYTES, _LEAST_CHUNK_BYTES = 512 << 20, 64 << 20


def usable(
    names: tuple[str, ...], training: Training, allowed: frozenset[str], budget_bytes: int
) -> Iterator[Technique]:
    """Yield those of use for this training and not yet applied; each is checked with the previous ones applied."""
    settings = {"chunked-loss": {"chunk_bytes": min(_LARGEST_CHUNK_BYTES, max(_LEAST_CHUNK_BYTES, budget_bytes // 32))}}
    for name in names:
        dtypes = {parameter.dtype for parameter in trained_parameters(training.optimizer)}
        helps = {
            "autocast": dtypes <= {torch.float32},  # a narrower dtype speeds matrix products up
            "master-weights": dtypes <= {torch.float32} and "host-states" in allowed,
            "stochastic-bf16": dtypes <= {torch.bfloat16},
            "tiled-norm": "compile" not in training.applied,  # compiled blocks fuse their norms
        }
        if name in allowed and name not in training.applied and helps.get(name, True):
            technique = technique_class(name)(**settings.get(name, {}))
            if technique.why_not(training) is None:
                yield technique


def with_coarse_states(resident: ResidentState, training: Training) -> ResidentState:
    """Estimate 8-bit states: two bytes per element, and two FP32 scales per block of 256."""
    elements = sum(parameter.numel() for parameter in trained_parameters(training.optimizer))
    return replace(resident, states_bytes=min(resident.states_bytes, elements * 2 + elements * 8 // 256))


def assemble(solution: Solution, survey: Survey, training: Training, division: MicroBatches) -> tuple[Technique, ...]:
    """Return the techniques beyond those already applied. `division` says how to divide a batch; its count is ignored."""
    layout, placement = solution.layout, solution.placement
    modes = dict(zip(survey.sizes[min(survey.sizes)].kinds, solution.choice.modes, strict=True))
    techniques: list[Technique] = []
    # Each block's mode: what runs again, and what is offloaded.
    on_gpu = {block: {BLOCK_OFFLOAD: BLOCK, OFFLOAD: KEEP}.get(mode, mode) for block, mode in modes.items()}
    recomputed = {block: recompute_mode(mode) for block, mode in on_gpu.items() if mode != KEEP}
    if recomputed:
        techniques.append(Recompute(modes=recomputed, slices=layout.slices if layout.sliced else 1))
    offloads: tuple[tuple[str, Literal["kept", "inputs"]], ...] = ((OFFLOAD, "kept"), (BLOCK_OFFLOAD, "inputs"))
    for mode, what in offloads:
        blocks = tuple(block for block, taken in modes.items() if taken == mode)
        if blocks:
            techniques.append(ActivationOffload(blocks=blocks, what=what, window_bytes=solution.window_bytes))
    # Placement of gradients and states.
    if placement == STEP_IN_BACKWARD:
        techniques.append(StepInBackward())
    elif placement.splits_states:
        on_host = placement == HOST_GRADIENTS
        techniques.append(
            HostStates(
                gpu_bytes=solution.states_on_gpu_bytes,
                how="host" if on_host else "device",
                gradients="host" if on_host and layout.micro_batches > 1 else "device",
                piece_bytes=PIECE_BYTES,
                window_bytes=WINDOW_BYTES,
            )
        )
    if layout.micro_batches > 1:
        techniques.append(replace(division, count=layout.micro_batches))
    return tuple(techniques)
