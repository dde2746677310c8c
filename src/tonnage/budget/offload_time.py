"""Seconds that offloading costs: transfers to the host or its drives, and how much of them compute hides.

| offloaded   | what moves                                                           | hidden behind             |
|-------------|----------------------------------------------------------------------|---------------------------|
| activations | out in the forward pass, back in the backward pass                   | that pass                 |
| parameters  | in for the forward pass and again for the backward pass, as stored   | that pass                 |
| optimizer   | gradients out; the host updates; parameters back, if they were there | backward; nothing; nothing|

Only trained parameters are updated; a frozen base moves with the parameters. On drives the states are also read and written, at
the drives' speed, while the host updates. `tonnage.budget.offload` computes the host memory needed.
"""

from typing import NamedTuple

import numpy as np

from tonnage.budget.activations import block_of
from tonnage.budget.configuration import Configuration, Place, Quantity
from tonnage.budget.frameworks import gradient_bytes
from tonnage.budget.moments import recomputed_blocks
from tonnage.budget.optimizer_time import step_bytes
from tonnage.budget.roofline import Calibration
from tonnage.budget.sharding import StageParameters
from tonnage.budget.states import optimizer_bytes, states, trained_parameters
from tonnage.budget.terms import total
from tonnage.hardware.cluster import Cluster
from tonnage.models.shape import ModelShape

_MASTER_BYTES = 4


class Crossing(NamedTuple):
    """Seconds over the host link: per micro-batch in either pass, of the last backward pass, and per step."""

    forward_s: Quantity
    backward_s: Quantity
    last_backward_s: Quantity
    step_s: Quantity


def crossing(
    shape: ModelShape, stage: StageParameters, configuration: Configuration, cluster: Cluster, shares: Calibration
) -> Crossing:
    """Return the transfers of one configuration or many; zero if nothing is offloaded."""
    pace = {place: bytes_per_s(place, cluster, shares) for place in ("host", "nvme")}
    none = 0.0 * np.asarray(stage.parameters)
    pass_s = none
    if configuration.activation_place != "gpu":
        pass_s = pass_s + kept_bytes(shape, stage, configuration) / pace[configuration.activation_place]
    if configuration.parameter_place != "gpu":
        # FSDP2 copies its FP32 shards and casts them on the GPU.
        held = total(states(shape, stage, configuration).parameters)
        pass_s = pass_s + held / pace[configuration.parameter_place]
    if configuration.optimizer_place == "gpu":
        return Crossing(pass_s, pass_s, none, none)
    count = trained_parameters(shape, stage, configuration)
    out_s = count * gradient_bytes(configuration) / pace["host"]
    back_s = count * configuration.compute_bytes / pace["host"] * (configuration.parameter_place == "gpu")
    return Crossing(pass_s, pass_s, out_s, _update_s(configuration, count, cluster, shares) + back_s)


def kept_bytes(shape: ModelShape, stage: StageParameters, configuration: Configuration) -> Quantity:
    """Return the bytes that one micro-batch saves for the backward pass on this stage."""
    kept: Quantity = 0.0
    for stack in shape.stacks:
        for layer, places in stack.kinds():
            block = block_of(shape, layer, stack.hidden, configuration)
            again = recomputed_blocks(configuration.checkpoint, places)
            entry = block.selective if configuration.checkpoint == "selective" else block.entry
            both = block.kept * (len(places) - again) + entry * again
            kept = kept + both.per_token(configuration, configuration.seq)
    tokens = configuration.tokens
    return kept * tokens * stage.share


def _update_s(configuration: Configuration, count: Quantity, cluster: Cluster, shares: Calibration) -> Quantity:
    """Return the update's seconds on the host's CPUs, which its GPUs share, including states read from drives."""
    update_s = count * step_bytes(configuration) * cluster.gpus_per_host / shares.host_optimizer_bytes_per_s
    if configuration.optimizer_place == "host":
        return update_s
    size = optimizer_bytes(configuration.optimizer) if configuration.optimizer not in ("adafactor", "muon") else 4
    swapped_s = 2 * count * (size + _MASTER_BYTES) / bytes_per_s("nvme", cluster, shares)
    return np.maximum(update_s, swapped_s)


def bytes_per_s(place: Place, cluster: Cluster, shares: Calibration) -> float:
    """Return a GPU's share of the bandwidth. Hosts with unknown drives are assumed to have one common drive per GPU."""
    if place == "nvme":
        return min(cluster.nvme_bytes_per_s or shares.nvme_default_bytes_per_s, cluster.host_link_bytes_per_s) * (
            shares.nvme_ceiling
        )
    return cluster.host_link_bytes_per_s * shares.host_link_ceiling
