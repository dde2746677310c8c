"""Seconds that offloading costs: transfers to the host or its drives, and how much of them compute hides.

| offloaded   | what moves                                                           | hidden behind             |
|-------------|----------------------------------------------------------------------|---------------------------|
| activations | out in the forward pass, back in the backward pass                   | that pass                 |
| parameters  | in for the forward pass and again for the backward pass, as stored   | that pass                 |
| optimizer   | gradients out; the host updates; parameters back, if they were there | backward; nothing; nothing|

Only trained parameters are updated; a frozen base moves with the parameters. On drives the states are also read and written, at
the drives' speed, while the host updates. `tonnage.budget.training.memory` computes the host memory needed.
"""

from typing import NamedTuple

import numpy as np

from tonnage.budget.terms import total
from tonnage.budget.time.optimizer import step_bytes
from tonnage.budget.time.roofline import Calibration
from tonnage.budget.training.configuration import Place, Quantity
from tonnage.budget.training.moments import recomputed_blocks
from tonnage.budget.training.states import StageShare, optimizer_bytes
from tonnage.hardware.cluster import Cluster

_MASTER_BYTES = 4


class Crossing(NamedTuple):
    """Seconds over the host link: per micro-batch in either pass, of the last backward pass, and per step."""

    forward_s: Quantity
    backward_s: Quantity
    last_backward_s: Quantity
    step_s: Quantity


def crossing(stage: StageShare, cluster: Cluster, shares: Calibration) -> Crossing:
    """Return the transfers of one configuration or many; zero if nothing is offloaded."""
    config = stage.configuration
    pace = {place: bytes_per_s(place, cluster, shares) for place in ("host", "nvme")}
    none = 0.0 * np.asarray(stage.parameters)
    pass_s = none
    if config.activation_place != "gpu":
        pass_s = pass_s + kept_bytes(stage) / pace[config.activation_place]
    if config.parameter_place != "gpu":
        # FSDP2 copies its FP32 shards and casts them on the GPU.
        pass_s = pass_s + total(stage.kept_parameters) / pace[config.parameter_place]
    if config.optimizer_place == "gpu":
        return Crossing(pass_s, pass_s, none, none)
    count = stage.updated
    out_s = count * config.gradient_bytes / pace["host"]
    back_s = count * config.compute_bytes / pace["host"] * (config.parameter_place == "gpu")
    # The update on the host's CPUs, which its GPUs share, including states read from drives.
    update_s = count * step_bytes(config) * cluster.gpus_per_host / shares.host_optimizer_bytes_per_s
    if config.optimizer_place == "nvme":
        size = optimizer_bytes(config.optimizer) if config.optimizer not in ("adafactor", "muon") else 4
        update_s = np.maximum(update_s, 2 * count * (size + _MASTER_BYTES) / pace["nvme"])
    return Crossing(pass_s, pass_s, out_s, update_s + back_s)


def kept_bytes(stage: StageShare) -> Quantity:
    """Return the bytes that one micro-batch saves for the backward pass on this stage."""
    config = stage.configuration
    kept: Quantity = 0.0
    for _, block, places in stage.blocks:
        again = recomputed_blocks(config.checkpoint, places)
        entry = block.selective if config.checkpoint == "selective" else block.entry
        both = block.kept * (len(places) - again) + entry * again
        kept = kept + both.per_token(config, config.seq)
    return kept * config.tokens * stage.share


def bytes_per_s(place: Place, cluster: Cluster, shares: Calibration) -> float:
    """Return a GPU's share of the bandwidth. Hosts with unknown drives are assumed to have one common drive per GPU."""
    if place == "nvme":
        rate = cluster.nvme_bytes_per_s or shares.nvme_default_bytes_per_s
        return min(rate, cluster.host_link_bytes_per_s) * shares.nvme_ceiling
    return cluster.host_link_bytes_per_s * shares.host_link_ceiling
