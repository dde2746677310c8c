"""Which GPUs hold a model: common ones (`hardware/data/common.toml`), and two, four or eight if one is too small.

A GPU that holds a training only with offload is marked; more GPUs are tried before that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from tonnage.budget.serving.memory import ServingConfiguration
from tonnage.errors import BadLayout
from tonnage.hardware import Cluster, find_cluster
from tonnage.hardware.catalogue import common_cards
from tonnage.models.shape import ModelShape
from tonnage.planner.serving.search import best_layout
from tonnage.planner.training.remedies import leanest
from tonnage.planner.training.request import NO_OFFLOAD, TrainingRequest, for_checkpoint, for_cluster
from tonnage.planner.training.search import PlanSearch, search


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A set of GPUs and what fits. `most` is the largest micro-batch, or sequences at once; 0 if it does not fit."""

    cluster: Cluster
    needed_bytes: int = 0  # per GPU
    most: int = 0
    tokens_per_s: float = 0.0
    offload: str = ""

    @property
    def memory_bytes(self) -> int:
        """Memory of all GPUs together."""
        return self.cluster.gpus * self.cluster.gpu.memory_bytes


def smallest(holders: list[Holder]) -> Holder | None:
    """Return the holder with the least memory, preferring those without offload."""
    holding = [holder for holder in holders if holder.most]
    return min(holding, key=lambda holder: (bool(holder.offload), holder.memory_bytes), default=None)


def training_holders(shape: ModelShape, request: TrainingRequest) -> list[Holder]:
    """Return the holders for a training, sorted by memory."""
    asked = for_checkpoint(request, shape)
    places = [NO_OFFLOAD, None] if asked.offload is None else [asked.offload]
    tries = [partial(_trained, shape, request=replace(asked, offload=place)) for place in places]
    return _holders(tries)


def serving_holders(shape: ModelShape, asked: ServingConfiguration, *, tp: int = 0, pp: int = 0) -> list[Holder]:
    """Return the holders for serving, sorted by memory. `tp` and `pp` 0 are searched."""
    return _holders([partial(_served, shape, asked=asked, tp=tp, pp=pp)])


def _holders(tries: Sequence[Callable[[Cluster], Holder | None]]) -> list[Holder]:
    """Return, for each common GPU, the first of its clusters with which the first of these works."""
    rows = []
    for card, counts in common_cards():
        clusters = [find_cluster(f"{count}x{card}") for count in counts]
        found = (tried(cluster) for tried in tries for cluster in clusters)
        rows.append(next((each for each in found if each is not None), Holder(cluster=clusters[-1])))
    return sorted(rows, key=lambda holder: holder.memory_bytes)


def _trained(shape: ModelShape, cluster: Cluster, request: TrainingRequest) -> Holder | None:
    asked = for_cluster(request, cluster)
    try:
        # Checking memory alone is faster than a search.
        if leanest(shape, cluster, asked) is None:
            return None
        findings = search(shape, cluster, asked)
    except BadLayout:
        return None
    best = findings.best
    if best is None:
        return None
    return Holder(
        cluster=cluster,
        needed_bytes=best.total_bytes,
        most=largest_micro_batch(findings),
        tokens_per_s=best.tokens_per_s,
        offload=best.offload.words if best.offload != NO_OFFLOAD else "",
    )


def largest_micro_batch(findings: PlanSearch) -> int:
    """Return the largest micro-batch of all fitting configurations, with full recomputation if that helps."""
    most = 1
    for judged in findings.judged:
        if judged.fits.any():
            sizes = np.broadcast_to(np.asarray(judged.family.configuration.samples), judged.fits.shape)
            most = max(most, int(sizes[judged.fits].max()))
    return most


def _served(shape: ModelShape, cluster: Cluster, asked: ServingConfiguration, tp: int, pp: int) -> Holder | None:
    """Return the GPUs with as many full-context sequences as they hold at once."""
    best = best_layout(shape, cluster, asked, tp=tp, pp=pp)
    if best is None:
        return None
    most = min(best.most_users, best.replicas * best.configuration.max_seqs)
    full = best_layout(shape, cluster, replace(asked, users=most), tp=tp, pp=pp) or best
    return Holder(
        cluster=cluster,
        needed_bytes=full.budget.total_bytes,
        most=most,
        tokens_per_s=full.tokens_per_s,
        offload=full.on_host,
    )
