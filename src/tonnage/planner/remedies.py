"""Changes that would make it fit if nothing does: one change each, with its flag and the resulting bytes.

Only memory is compared, in the leanest configuration that the request allows. In order: given flags that could be left
to the planner, changes to the training, more or larger GPUs, and the smallest common GPU that suffices.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import numpy as np

from tonnage.budget.adapters import Base
from tonnage.budget.configuration import Configuration
from tonnage.budget.training import needed_bytes
from tonnage.errors import BadLayout, UnknownGpu
from tonnage.hardware import find_cluster
from tonnage.hardware.cluster import Cluster, common_clusters
from tonnage.models.shape import ModelShape
from tonnage.planner.request import NO_OFFLOAD, TrainingRequest, check, for_cluster
from tonnage.planner.search import PlanSearch
from tonnage.planner.space import family, layouts, offloads, passes, shardings
from tonnage.techniques import asked_by_flag

_SHORTEST_SEQ = 256
_MOST_DOUBLINGS = 8
_MOST = 5
# Flags count samples, which have several sequences if pairs are compared.
_MEANT = {"micro_batch": "samples"}
# A common LoRA rank.
DEFAULT_RANK = 16


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change that makes it fit."""

    change: str
    flag: str
    total_bytes: int
    capacity_bytes: int


def remedies(findings: PlanSearch) -> list[Remedy]:
    """Return the first few that help, the least intrusive first."""
    shape, cluster, request = findings.shape, findings.cluster, findings.request
    doubled = (f"{cluster.gpus * 2**times}x{cluster.gpu.key}" for times in range(1, _MOST_DOUBLINGS))
    tries = [
        _released(shape, cluster, request),
        _other_training(shape, cluster, request),
        _shorter(shape, cluster, request),
        islice(_clusters(shape, request, "more GPUs", doubled), 1),
    ]
    found = list(islice(chain.from_iterable(tries), _MOST - 1))
    return found + list(_other_cards(shape, cluster, request, {remedy.flag for remedy in found}))


def leanest(shape: ModelShape, cluster: Cluster, request: TrainingRequest) -> tuple[Configuration, str, int] | None:
    """Return the first fitting configuration among the leanest, its offload and its bytes; None if none fits."""
    lean = replace(
        request,
        checkpoint=request.checkpoint or "full",
        loss=request.loss or "chunked",
        micro_batch=request.micro_batch or 1,
        global_batch=request.step_sequences(cluster.gpus) if request.micro_batch is None else request.global_batch,
    )
    if request.objective.sees_whole_batch:
        alone = request.micro_batch is None and request.global_batch is None
        lean = replace(lean, micro_batch=1 if alone else request.micro_batch, global_batch=request.global_batch)
    try:
        check(lean, shape, cluster)
    except BadLayout:
        return None
    rows = layouts(shape, cluster, lean)
    for sharding in (
        one for choices in offloads(lean) for offload in choices for one in shardings(lean, rows, offload)
    ):
        asked = family(lean, sharding, *passes(lean, sharding.offload)[0])
        needed, host_bytes = needed_bytes(shape, asked.configuration, cluster.gpu)
        total = np.broadcast_to(np.asarray(needed), (asked.size,))
        fits = (total <= cluster.gpu.memory_bytes) & (host_bytes <= cluster.host_memory_per_gpu_bytes)
        if fits.any():
            index = int(np.where(fits, total, np.inf).argmin())
            return asked.configuration.at(index), asked.offload.words, int(total[index])
    return None


def _tried(shape: ModelShape, cluster: Cluster, request: TrainingRequest, change: str, flag: str) -> Remedy | None:
    """Return the remedy if the change helps. In `flag`, `{}` stands for the value found."""
    found = leanest(shape, cluster, request)
    if found is None:
        return None
    configuration, offload, total_bytes = found
    name = flag.removeprefix("--").partition(" ")[0].replace("-", "_")
    value = offload if name == "offload" else getattr(configuration, _MEANT.get(name, name), "")
    return Remedy(change, flag.format(value), total_bytes, cluster.gpu.memory_bytes)


def _released(shape: ModelShape, cluster: Cluster, request: TrainingRequest) -> Iterator[Remedy]:
    """Yield given flags that help when left to the planner, one at a time."""
    for name in ("checkpoint", "loss", "zero", "micro_batch", "offload", "tp", "pp", "cp", "ep"):
        if getattr(request, name) is None:
            continue
        released: dict[str, Any] = {name: None}
        flag = f"--{name.replace('_', '-')}"
        remedy = _tried(shape, cluster, replace(request, **released), f"another {flag}", f"{flag} {{}}")
        if remedy:
            yield remedy


def _other_training(shape: ModelShape, cluster: Cluster, request: TrainingRequest) -> Iterator[Remedy]:
    """Yield changes to what is trained or in which precision; of the adapters, only the first that helps."""
    objective, whole = request.objective, not request.lora_rank
    tries: list[tuple[bool, str, dict[str, Any]]] = [
        (objective.sees_whole_batch, "grad-cache", {"objective": replace(objective, grad_cache=True)}),
        (objective.how == "copy", "precomputed-reference", {"objective": replace(objective, how="precomputed")}),
        (request.optimizer in ("adam", "adamw") and whole, "eight-bit-states", {}),
        (request.precision != "bf16" and cluster.gpu.has_bf16 and whole, "bf16-parameters", {}),
    ]
    for applies, technique, changed in tries:
        change, flag, fields = asked_by_flag(technique)
        if applies and (remedy := _tried(shape, cluster, replace(request, **fields, **changed), change, flag)):
            yield remedy
    rank = request.lora_rank or DEFAULT_RANK
    adapters: list[tuple[bool, str, Base]] = [(whole, "adapters", request.base), (True, "quantized-adapters", "nf4")]
    for applies, technique, base in adapters:
        change, flag, _ = asked_by_flag(technique, rank=rank)
        asked = replace(request, lora_rank=rank, base=base)
        if applies and (remedy := _tried(shape, cluster, asked, change, flag)):
            yield remedy
            return


def _shorter(shape: ModelShape, cluster: Cluster, request: TrainingRequest) -> Iterator[Remedy]:
    """Yield the sequence length halved until it fits, if the shortest does."""
    if shape.fixed_tokens:
        return
    lengths = [request.seq >> halved for halved in range(1, 32) if request.seq >> halved >= _SHORTEST_SEQ]
    if not lengths or leanest(shape, cluster, _cut(request, lengths[-1])) is None:
        return
    for seq in lengths:
        remedy = _tried(shape, cluster, _cut(request, seq), "shorter sequences", f"--seq {seq}")
        if remedy:
            yield remedy
            return


def _cut(request: TrainingRequest, seq: int) -> TrainingRequest:
    return replace(request, seq=seq, lengths=request.lengths and request.lengths.limited(seq))


def _other_cards(shape: ModelShape, cluster: Cluster, request: TrainingRequest, offered: set[str]) -> Iterator[Remedy]:
    """Yield the smallest common GPU that holds it without offload, unless already offered."""
    asked = replace(request, offload=request.offload or NO_OFFLOAD)
    names = [each.name for each in common_clusters(cluster.gpu.maker)]
    found = next(_clusters(shape, asked, "{} would do", iter(names)), None)
    if found and found.flag not in offered:
        yield found


def _clusters(shape: ModelShape, request: TrainingRequest, change: str, names: Iterator[str]) -> Iterator[Remedy]:
    for name in names:
        try:
            cluster = find_cluster(name)
            remedy = _tried(shape, cluster, for_cluster(request, cluster), change.format(name), f"--gpus {name}")
        except UnknownGpu:
            continue
        if remedy:
            yield remedy
