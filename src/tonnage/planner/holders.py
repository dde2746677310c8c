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
from tonnage.planner.training.request import NO_OFFLOAD, Offload, TrainingRequest, for_checkpoint, for_cluster
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

    def trained(cluster: Cluster, offload: Offload | None) -> Holder | None:
        here = for_cluster(replace(asked, offload=offload), cluster)
        try:
            # Checking memory alone is faster than a search.
            findings = search(shape, cluster, here) if leanest(shape, cluster, here) else None
        except BadLayout:
            return None
        if findings is None or (best := findings.best) is None:
            return None
        most, words = largest_micro_batch(findings), best.offload.words if best.offload != NO_OFFLOAD else ""
        needed, speed = best.total_bytes, best.tokens_per_s
        return Holder(cluster=cluster, needed_bytes=needed, most=most, tokens_per_s=speed, offload=words)

    places = [NO_OFFLOAD, None] if asked.offload is None else [asked.offload]
    return _holders([partial(trained, offload=place) for place in places])


def serving_holders(shape: ModelShape, asked: ServingConfiguration, *, tp: int = 0, pp: int = 0) -> list[Holder]:
    """Return the holders for serving, with as many full-context sequences as they hold at once, sorted by memory.

    `tp` and `pp` 0 are searched.
    """

    def served(cluster: Cluster) -> Holder | None:
        if (best := best_layout(shape, cluster, asked, tp=tp, pp=pp)) is None:
            return None
        most = min(best.most_users, best.replicas * best.configuration.max_seqs)
        full = best_layout(shape, cluster, replace(asked, users=most), tp=tp, pp=pp) or best
        needed, speed = full.budget.total_bytes, full.tokens_per_s
        return Holder(cluster=cluster, needed_bytes=needed, most=most, tokens_per_s=speed, offload=full.on_host)

    return _holders([served])


def _holders(tries: Sequence[Callable[[Cluster], Holder | None]]) -> list[Holder]:
    """Return, for each common GPU, the first of its clusters with which the first of these works."""
    rows = []
    for card, counts in common_cards():
        clusters = [find_cluster(f"{count}x{card}") for count in counts]
        found = (tried(cluster) for tried in tries for cluster in clusters)
        rows.append(next((each for each in found if each is not None), Holder(cluster=clusters[-1])))
    return sorted(rows, key=lambda holder: holder.memory_bytes)


def largest_micro_batch(findings: PlanSearch) -> int:
    """Return the largest micro-batch of all fitting configurations, with full recomputation if that helps."""
    fitting = [one for one in findings.judged if one.fits.any()]
    sizes = (np.broadcast_to(one.family.configuration.samples, one.fits.shape)[one.fits].max() for one in fitting)
    return max(map(int, sizes), default=1)
