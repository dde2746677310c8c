"""Changes that would make it fit if nothing does: one change each, with its flag and the resulting bytes.

Only memory is compared, in the leanest configuration that the request allows. In order: given flags that could be left
to the planner, more host memory if nothing else is missing, changes to the training, more or larger GPUs, and the
smallest common GPU that suffices. The best plan with the first of these changes is the next plan that fits.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np

from tonnage.budget.training.adapters import Base
from tonnage.budget.training.configuration import Configuration
from tonnage.errors import BadLayout, RequestError
from tonnage.hardware import find_cluster
from tonnage.hardware.cluster import Cluster, Stated, common_clusters
from tonnage.models.shape import ModelShape
from tonnage.planner.training.demands import are_met, demands_of
from tonnage.planner.training.request import NO_OFFLOAD, TrainingRequest, check, for_cluster
from tonnage.planner.training.search import PlanSearch, TrainingPlan, search
from tonnage.planner.training.space import searches
from tonnage.techniques import asked_by_flag
from tonnage.units import GIB

_SHORTEST_SEQ = 256
_MOST_DOUBLINGS = 8
_MOST = 5
# Flags count samples, which have several sequences if pairs are compared.
_MEANT = {"micro_batch": "samples"}
# A common LoRA rank.
DEFAULT_RANK = 16
_Candidate = tuple[Cluster, TrainingRequest, str, str]  # where, what is asked, the change in words, its flag


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change that makes it fit, and what is asked of which GPUs with it."""

    change: str
    flag: str
    total_bytes: int
    capacity_bytes: int
    cluster: Cluster
    request: TrainingRequest


class NextPlan(NamedTuple):
    """The best plan with a remedy, and the remedy's flag."""

    flag: str
    plan: TrainingPlan


def next_plan(findings: PlanSearch, remedies: list[Remedy]) -> NextPlan | None:
    """Return the best plan with the first remedy; None if there is no remedy."""
    for remedy in remedies:
        best = search(findings.shape, remedy.cluster, remedy.request).best
        if best is not None:
            return NextPlan(remedy.flag, best)
    return None


def remedies(findings: PlanSearch) -> list[Remedy]:
    """Return the first few that help, the least intrusive first."""
    shape, cluster, request = findings.shape, findings.cluster, findings.request

    def tried(candidates: Iterable[_Candidate]) -> Iterator[Remedy]:
        """Yield the changes that help. In a flag, `{}` stands for the value found."""
        for where, asked, change, flag in candidates:
            if found := leanest(shape, where, asked):
                config, offload, total_bytes = found
                name = flag.removeprefix("--").partition(" ")[0].replace("-", "_")
                value = offload if name == "offload" else getattr(config, _MEANT.get(name, name), "")
                yield Remedy(change, flag.format(value), total_bytes, where.gpu.memory_bytes, where, asked)

    doubled = (f"{cluster.gpus * 2**times}x{cluster.gpu.key}" for times in range(1, _MOST_DOUBLINGS))
    tries = [
        tried(_released(cluster, request)),
        islice(tried(_larger_hosts(findings)), 1),
        tried(_other_training(cluster, request)),
        islice(tried(_adapters(cluster, request)), 1),
        islice(tried(_shorter(shape, cluster, request)), 1),
        islice(tried(_clusters(request, cluster.stated, "more GPUs", doubled)), 1),
    ]
    found = list(islice(chain.from_iterable(tries), _MOST - 1))
    # The smallest common GPU that holds it without offload, unless already offered.
    names = (each.name for each in common_clusters(cluster.gpu.maker))
    asked = replace(request, offload=request.offload or NO_OFFLOAD)
    other = next(tried(_clusters(asked, cluster.stated, "{} would do", names)), None)
    return [*found, other] if other and other.flag not in {remedy.flag for remedy in found} else found


def leanest(shape: ModelShape, cluster: Cluster, request: TrainingRequest) -> tuple[Configuration, str, int] | None:
    """Return the first fitting configuration among the leanest, its offload and its bytes; None if none fits."""
    micro_batch, global_batch = request.micro_batch, request.global_batch
    if not request.objective.sees_whole_batch:
        global_batch = request.step_sequences(cluster.gpus) if micro_batch is None else global_batch
        micro_batch = micro_batch or 1
    elif global_batch is None:
        micro_batch = micro_batch or 1
    lean = replace(
        request, checkpoint=request.checkpoint or "full", loss=request.loss or "chunked", micro_batch=micro_batch,
        global_batch=global_batch,
    )  # fmt: skip
    try:
        check(lean, shape, cluster)
    except BadLayout:
        return None
    for asked in chain.from_iterable(searches(shape, cluster, lean)):
        demands = demands_of(shape, asked.configuration, cluster)
        total = np.broadcast_to(np.asarray(demands[0].needed_bytes), (asked.size,))
        fits = are_met(demands, asked.size)
        if fits.any():
            index = int(np.where(fits, total, np.inf).argmin())
            return asked.configuration.at(index), asked.offload.words, int(total[index])
    return None


def _released(cluster: Cluster, request: TrainingRequest) -> Iterator[_Candidate]:
    """Yield the request with each given flag left to the planner."""
    for name in ("checkpoint", "loss", "zero", "framework", "micro_batch", "offload", "tp", "pp", "cp", "ep", "shard"):
        if getattr(request, name) is not None:
            released: dict[str, Any] = {name: None}
            flag = f"--{name.replace('_', '-')}"
            yield cluster, replace(request, **released), f"another {flag}", f"{flag} {{}}"


def _larger_hosts(findings: PlanSearch) -> Iterator[_Candidate]:
    """Yield the same GPUs in hosts with as much memory as the closest plan needs, if that is all it lacks."""
    lacking, cluster = findings.closest.shortages, findings.cluster
    if all(demand.part in ("host", "loading on the host") for demand in lacking):
        needed_gib = math.ceil(max(demand.needed_bytes for demand in lacking) / GIB)
        larger = cluster.with_host(memory_bytes=needed_gib * GIB)
        yield larger, findings.request, "more host memory", f"--host-memory {needed_gib}g"


def _other_training(cluster: Cluster, request: TrainingRequest) -> Iterator[_Candidate]:
    """Yield changes to how it is trained or in which precision."""
    objective, whole = request.objective, not request.lora_rank
    tries: list[tuple[bool, str, dict[str, Any]]] = [
        (objective.sees_whole_batch, "grad-cache", {"objective": replace(objective, grad_cache=True)}),
        (objective.how == "copy", "precomputed-reference", {"objective": replace(objective, how="precomputed")}),
        (request.optimizer in ("adam", "adamw") and whole, "eight-bit-states", {}),
        (request.precision != "bf16" and cluster.gpu.has_bf16 and whole, "bf16-parameters", {}),
    ]
    for applies, technique, changed in tries:
        if applies:
            change, flag, fields = asked_by_flag(technique)
            yield cluster, replace(request, **fields, **changed), change, flag


def _adapters(cluster: Cluster, request: TrainingRequest) -> Iterator[_Candidate]:
    rank = request.lora_rank or DEFAULT_RANK
    bases: dict[str, Base] = {} if request.lora_rank else {"adapters": request.base}
    for technique, base in (bases | {"quantized-adapters": "nf4"}).items():
        change, flag, _ = asked_by_flag(technique, rank=rank)
        yield cluster, replace(request, lora_rank=rank, base=base), change, flag


def _shorter(shape: ModelShape, cluster: Cluster, request: TrainingRequest) -> Iterator[_Candidate]:
    """Yield the sequence length halved again and again, if the shortest fits."""
    lengths = [request.seq >> halved for halved in range(1, 32) if request.seq >> halved >= _SHORTEST_SEQ]
    cut = [replace(request, seq=seq, lengths=request.lengths and request.lengths.limited(seq)) for seq in lengths]
    if not shape.fixed_tokens and cut and leanest(shape, cluster, cut[-1]):
        for asked in cut:
            yield cluster, asked, "shorter sequences", f"--seq {asked.seq}"


def _clusters(request: TrainingRequest, stated: Stated, change: str, names: Iterable[str]) -> Iterator[_Candidate]:
    """Yield other GPUs, with what was stated of the host."""
    for name in names:
        with suppress(RequestError):
            cluster = find_cluster(name).as_stated(stated)
            yield cluster, for_cluster(request, cluster), change.format(name), f"--gpus {name}"
