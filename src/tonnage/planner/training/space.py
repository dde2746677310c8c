"""The search space: families of configurations that differ in kind, each with arrays of layouts and batches.

| choice               | searched if left open                                                               |
|----------------------|-------------------------------------------------------------------------------------|
| tp, pp, cp, ep       | every divisor of the GPUs that the model allows                                      |
| micro-batch          | every divisor of a rank's share of the step, up to 64; images up to 512              |
| ZeRO                 | 0 to 3, and hybrid sharding within hosts if there are several                        |
| framework            | `RUNNERS`: those that train transformers models as they are                          |
| checkpoint           | none, selective, every K-th block, full                                              |
| loss                 | full, chunked                                                                        |
| optimizer's kernel   | fused if there is one (it is faster and needs no temporaries), else foreach          |
| offload              | nothing; if memory is short, to the host; if nothing fits even so, to drives         |

This module computes neither memory nor time.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tonnage.budget.training.configuration import NUMBERS, Configuration, FrameworkName, Loss, Place
from tonnage.hardware.cluster import Cluster
from tonnage.models.shape import ModelShape
from tonnage.planner import divisors
from tonnage.planner.training.request import (
    FRAMEWORK_STAGES,
    NO_OFFLOAD,
    Offload,
    TrainingRequest,
    expert_count,
    head_counts,
    layer_count,
)

CHECKPOINTS = ("none", "selective", "every-8", "every-4", "every-3", "every-2", "full")
# Recomputed activations need not be offloaded: a few ways to share the work are enough.
OFFLOADED_CHECKPOINTS = ("none", "selective", "full")
_HOST: tuple[Place, ...] = ("gpu", "host")
# Tried in turn: the second if memory is short, the third if nothing fits.
OFFLOADS: tuple[tuple[Offload, ...], ...] = (
    (NO_OFFLOAD,),
    tuple(Offload(*places) for places in product(_HOST, repeat=3) if "host" in places),
    tuple(Offload("nvme", *places) for places in product((*_HOST, "nvme"), _HOST)),
)
# Frameworks per ZeRO stage that train transformers models as they are, if none is asked for. Others have their own
# blocks.
RUNNERS: dict[int, tuple[FrameworkName, ...]] = {
    0: ("torch",),
    1: ("deepspeed", "torch"),
    2: ("deepspeed", "fsdp2"),
    3: ("fsdp2", "deepspeed"),
}
# Micro-batches that fill a pipeline if only the micro-batch was asked for.
PIPELINE_FILL = 4
_LARGEST_MICRO_BATCH = 64
_MOST_IMAGES = 512  # the same for vision models, whose samples are short
# Pairs of a contrastive batch per GPU that are tried if none was asked for.
_CONTRASTED = sorted(factor << power for factor in (1, 3) for power in range(15))
_FUSED = ("sgd", "momentum", "adam", "adamw", "adamw-8bit")


@dataclass(frozen=True, slots=True)
class Layouts:
    """Numbers of many configurations, one row each."""

    tp: NDArray[np.int64]
    pp: NDArray[np.int64]
    cp: NDArray[np.int64]
    ep: NDArray[np.int64]
    data: NDArray[np.int64]
    shard: NDArray[np.int64]
    micro_batch: NDArray[np.int64]
    accumulate: NDArray[np.int64]

    def where(self, chosen: NDArray[Any]) -> "Layouts":
        """Return a subset of rows, by index or mask."""
        return Layouts(*(getattr(self, name)[chosen] for name in self.__slots__))

    @property
    def splits_model(self) -> NDArray[np.bool_]:
        """Rows in which one copy of the model is split over GPUs."""
        return self.tp * self.pp * self.cp * self.ep > 1


def layouts(shape: ModelShape, cluster: Cluster, request: TrainingRequest) -> Layouts:
    """Return every layout of the GPUs with every micro-batch."""
    most = _MOST_IMAGES if shape.fixed_tokens else _LARGEST_MICRO_BATCH
    rows = []
    for (tp, pp, cp, ep), data in _degrees(shape, cluster.gpus, request):
        # Shard groups: all data-parallel ranks, those of one host, or as asked.
        near = cluster.gpus_per_host // (tp * cp)
        shards = {data, near} if request.zero != 0 and 1 < near < data and data % near == 0 else {data}
        if request.shard is not None:
            shards = {request.shard} if data % request.shard == 0 else set()
        batches = list(_batches(pp, data, cluster.gpus, request, most))
        rows += [(tp, pp, cp, ep, data, shard, *batch) for shard in shards for batch in batches]
    table = np.array(rows, dtype=np.int64).reshape(-1, 8)
    # Batches count samples so far; a pass takes all sequences of each, or one after another.
    table[:, 6] *= request.objective.in_pass
    table[:, 7] *= request.objective.sequences // request.objective.in_pass
    return Layouts(*table.T)


def _degrees(shape: ModelShape, gpus: int, request: TrainingRequest) -> Iterator[tuple[tuple[int, int, int, int], int]]:
    """Yield tensor, pipeline, context and expert parallelism, and the remaining data parallelism."""
    heads, layers, experts = head_counts(shape), layer_count(shape), expert_count(shape)
    plain = request.objective.plain
    for tp, pp, cp in product(divisors(gpus), repeat=3):
        asked = all(value in (None, degree) for value, degree in ((request.tp, tp), (request.pp, pp), (request.cp, cp)))
        if not asked or gpus % (tp * pp * cp) or (tp * pp * cp > 1 and not plain):
            continue
        if any(count % tp for count in heads) or pp > layers or request.seq % cp:
            continue
        data, spread = gpus // (tp * pp * cp), divisors(experts) if experts and plain else [1]
        for ep in spread if request.ep is None else [request.ep]:
            if tp * cp * data % ep == 0:
                yield (tp, pp, cp, ep), data


def _batches(pp: int, data: int, gpus: int, request: TrainingRequest, most: int) -> Iterator[tuple[int, int]]:
    """Yield micro-batch sizes and how many of them make a step."""
    if request.step_in_backward or request.objective.sees_whole_batch:
        # One pass is a step.
        whole = request.global_batch // data if request.global_batch else None
        open_sizes = divisors(most) if request.step_in_backward else _CONTRASTED
        sizes = [request.micro_batch or whole] if request.micro_batch or whole else open_sizes
        if pp == 1 or not request.step_in_backward:
            yield from ((size, 1) for size in sizes if size and whole in (None, size))
    elif request.global_batch is None and request.micro_batch is not None:
        yield request.micro_batch, 1 if pp == 1 else PIPELINE_FILL * pp
    elif (sequences := request.step_sequences(gpus)) % data == 0:
        share = sequences // data
        for size in divisors(share):
            # Interleaved stages run micro-batches in groups of `pp`.
            in_rounds = request.pp_chunks == 1 or share // size % pp == 0
            if in_rounds and (size == request.micro_batch or (request.micro_batch is None and size <= most)):
                yield size, share // size


@dataclass(frozen=True, slots=True)
class Family:
    """Configurations of one kind, whose numbers are arrays, and the ways to recompute and take the loss to try."""

    configuration: Configuration
    offload: Offload
    ways: list[tuple[str, Loss]]  # the leanest, which the configuration has first, to the fastest

    @property
    def size(self) -> int:
        """Number of configurations."""
        return int(np.size(self.configuration.tp))

    def where(self, chosen: NDArray[Any]) -> "Family":
        """Return a subset of its configurations."""
        numbers = {name: getattr(self.configuration, name) for name in NUMBERS}
        some = {name: value[chosen] for name, value in numbers.items() if isinstance(value, np.ndarray)}
        return replace(self, configuration=replace(self.configuration, **some))

    def running(self, checkpoint: str, loss: Loss) -> "Family":
        """Return the same configurations with another recomputation and loss."""
        return replace(self, configuration=replace(self.configuration, checkpoint=checkpoint, loss=loss))


def passes(request: TrainingRequest, offload: Offload) -> list[tuple[str, Loss]]:
    """Return options of recomputation and loss, the leanest first."""
    searched = CHECKPOINTS if offload.activations == "gpu" else OFFLOADED_CHECKPOINTS
    checkpoints = searched if request.checkpoint is None else (request.checkpoint,)
    losses: tuple[Loss, ...] = ("chunked", "full") if request.loss is None else (request.loss,)
    return [(checkpoint, loss) for checkpoint in reversed(checkpoints) for loss in losses]


def recomputed_share(checkpoint: str) -> float:
    """Return the share of blocks that are recomputed whole."""
    every = checkpoint.removeprefix("every-")
    return 1 / int(every) if every != checkpoint else float(checkpoint == "full")


def recomputes_less(way: tuple[str, Loss], other: tuple[str, Loss]) -> bool:
    """Say whether one option recomputes no more than another."""
    (checkpoint, loss), (than, other_loss) = way, other
    if loss == "chunked" and other_loss == "full":
        return False
    if checkpoint == than or checkpoint == "none" or than == "full":
        return True
    # Part of every block and all of some blocks do not compare.
    return "selective" not in (checkpoint, than) and recomputed_share(checkpoint) <= recomputed_share(than)


def searches(shape: ModelShape, cluster: Cluster, request: TrainingRequest) -> Iterator[list[Family]]:
    """Yield the families to try first, if memory is short, and if nothing fits."""
    rows = layouts(shape, cluster, request)
    searched = [some for some in OFFLOADS if request.drives or not some[0].on_drives]
    for choices in searched if request.offload is None else [(request.offload,)]:
        yield [family for offload in choices for family in shardings(request, rows, offload)]


def shardings(request: TrainingRequest, rows: Layouts, offload: Offload) -> Iterator[Family]:
    """Yield ZeRO stages with their frameworks and layouts, except pointless ones, in their leanest form."""
    ways = passes(request, offload)
    given = {field.name for field in fields(request)} & {field.name for field in fields(Configuration)}
    given -= {"seq", "checkpoint", "loss", "zero", "framework", "optimizer_kernel", *Layouts.__slots__}
    plain = Configuration(
        **{name: getattr(request, name) for name in given},
        optimizer_kernel=request.optimizer_kernel or ("fused" if request.optimizer in _FUSED else "foreach"),
        checkpoint=ways[0][0],
        loss=ways[0][1],
        optimizer_place=offload.optimizer,
        parameter_place=offload.parameters,
        activation_place=offload.activations,
    )
    for zero in (0, 1, 2, 3) if request.zero is None else (request.zero,):
        # Offloaded states are sharded ones; parameters can be offloaded only if they are sharded.
        least = 3 if offload.parameters != "gpu" else 2 if offload.optimizer != "gpu" else 0
        if request.zero is None and zero < least:
            continue
        moved = (offload.optimizer, offload.parameters) != ("gpu", "gpu")
        anyway = zero == 0 or request.zero is not None or moved
        useful = rows if anyway else rows.where(rows.data * rows.cp > 1)  # where there is something to shard
        # Hybrid sharding applies to everything or nothing, unless it was asked for.
        useful = useful if zero == 3 or request.shard else useful.where(useful.shard == useful.data)
        useful = useful if zero else replace(useful, shard=np.ones_like(useful.shard))
        # With ZeRO 1, Megatron shards the states of a model that is split over GPUs.
        megatron: tuple[FrameworkName, ...] = ("megatron",) if request.objective.plain and request.zero == 1 else ()
        runners = (*RUNNERS[zero], *megatron)
        if request.framework is not None:
            runners = (request.framework,) if zero in FRAMEWORK_STAGES[request.framework] else ()
        for framework in runners:
            chosen = useful if request.framework else useful.where(_runs(framework, zero, request, offload, useful))
            if chosen.tp.size:
                seq = request.lengths.worst(chosen.micro_batch) if request.lengths else request.seq
                numbers = {name: getattr(chosen, name) for name in Layouts.__slots__}
                yield Family(replace(plain, zero=zero, framework=framework, seq=seq, **numbers), offload, ways)


def _runs(
    framework: FrameworkName, zero: int, request: TrainingRequest, offload: Offload, rows: Layouts
) -> NDArray[np.bool_]:
    """Return the layouts for which a framework is tried."""
    if framework == "deepspeed":
        return ~rows.splits_model & (bool(request.shard) | np.equal(rows.shard, rows.data))
    if framework == "torch" and zero:
        return ~rows.splits_model
    # FSDP2 offloads parameters together with their states, or neither.
    together = "nvme" not in (offload.optimizer, offload.parameters) and offload.optimizer == offload.parameters
    if framework == "fsdp2" and not (together or request.offload):
        return np.zeros(rows.tp.shape, dtype=bool)
    return rows.splits_model if framework == "megatron" else np.ones(rows.tp.shape, dtype=bool)
