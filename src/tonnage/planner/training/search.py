"""Find the fastest configuration that fits, or a simpler one of about equal speed; alternatives; the Pareto front.

Every family is one array of configurations evaluated at once. Offload is searched only if memory is short without it:
the host link is a hundredth as fast as the GPU's own memory.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tonnage.budget.demands import Demand, shortages
from tonnage.budget.loading import Loading, training_loading
from tonnage.budget.terms import Term
from tonnage.budget.time.step import StepClock
from tonnage.budget.training.configuration import Configuration, Loss, Quantity
from tonnage.budget.training.memory import TrainingBudget, peak_factors, training_budget
from tonnage.errors import BadLayout
from tonnage.hardware.cluster import Cluster
from tonnage.ledger import Ledger
from tonnage.models.shape import ModelShape
from tonnage.planner.training.demands import are_met, demands_of, step_demands
from tonnage.planner.training.lengths import BATCHINGS, Batching, clock_of
from tonnage.planner.training.request import NO_OFFLOAD, Offload, TrainingRequest, check, for_checkpoint, for_cluster
from tonnage.planner.training.simplicity import burden, comparable, fastest, simplest
from tonnage.planner.training.space import Family, recomputed_share, recomputes_less, searches

# A configuration that needs this much less is worth showing beside a faster one.
_AS_SMALL = 0.05
# A layout that needs this much of the card in its leanest form is not tried in others, nor one with at best this share
# of the speed of what fits.
_HOPELESS = 1.1
_WORTH_TRYING = 0.9
# Share of the card that plans leave free if any can: about the error of predicted reserved memory.
HEADROOM = 0.05
_ALTERNATIVES = 4
_FRONT = 8
Timed = Literal["all", "what fits", "what leaves headroom"]


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """One configuration with plain numbers, the memory it needs on one GPU and its step time."""

    configuration: Configuration
    offload: Offload
    terms: tuple[Term, ...]
    ledger: Ledger
    moment: str  # of the peak
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    total_bytes: int
    host_bytes: int
    pinned_bytes: int
    drive_bytes: int
    loading: Loading
    demands: tuple[Demand, ...]
    capacity_bytes: int
    host_capacity_bytes: int
    parts_s: dict[str, float]
    hidden_s: float
    tokens_per_s: float  # of samples, without padding
    sample_tokens: float  # mean
    stages: dict[str, dict[str, int]] = field(default_factory=dict)  # sizes of both ends of a pipeline

    @property
    def sequences_per_s(self) -> float:
        """Samples per second of all GPUs together."""
        return self.tokens_per_s / self.sample_tokens

    @property
    def step_s(self) -> float:
        """Seconds of one optimizer step."""
        return sum(self.parts_s.values())

    @property
    def samples(self) -> int:
        """Samples per step: sequences, or pairs if they are compared."""
        return round(self.tokens / self.sample_tokens) // self.configuration.objective.sequences

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return round(self.tokens_per_s * self.step_s)

    @property
    def shortages(self) -> tuple[Demand, ...]:
        """What there is too little of: memory of the GPU or of the host, drives, or memory while loading."""
        return shortages(self.demands)

    @property
    def fits(self) -> bool:
        """Whether there is enough of everything: the verdict of reports, exit statuses and exports."""
        return not self.shortages

    @property
    def range_bytes(self) -> tuple[int, int]:
        """Range in which nine of ten such runs lie."""
        low, high = peak_factors(self.configuration)
        return round(low * self.total_bytes), round(high * self.total_bytes)

    @property
    def tight(self) -> bool:
        """Whether it fits, but would not at the high end of its range."""
        return self.fits and self.range_bytes[1] > self.capacity_bytes


@dataclass(frozen=True, slots=True)
class Judged:
    """A family and its results, one number per configuration. Configurations not timed have speed 0."""

    family: Family
    total_bytes: NDArray[np.float64]
    missing_bytes: NDArray[np.float64]  # of all parts together, for each GPU
    loads: NDArray[np.bool_]  # whether loading fits, which depends on the layout alone
    fits: NDArray[np.bool_]
    tokens_per_s: NDArray[np.float64]
    leaves_headroom: NDArray[np.bool_]  # and fits
    ruled_out: int = 0  # skipped configurations: a leaner one is too large, or one with less recomputation fits


@dataclass(frozen=True)
class PlanSearch:
    """Everything that was searched."""

    shape: ModelShape
    cluster: Cluster
    request: TrainingRequest
    clock: StepClock
    judged: list[Judged]
    pool: list[Judged]  # the same, counting only what leaves headroom as fitting: plans are chosen from it
    best: TrainingPlan | None
    closest: TrainingPlan  # the best if one fits, else the one that needs least
    alternatives: list[TrainingPlan] = field(default_factory=list)
    fastest: TrainingPlan | None = None  # of the pool: the best, or one faster by less than the clock's error

    @property
    def fits(self) -> bool:
        """Whether the best plan fits."""
        return self.closest.fits

    @property
    def gain_of_fastest(self) -> float:
        """Relative speedup of the fastest over the best."""
        return self.fastest.tokens_per_s / self.closest.tokens_per_s - 1 if self.fastest else 0.0

    @property
    def searched(self) -> int:
        """Number of configurations, evaluated or ruled out by another."""
        return sum(one.family.size + one.ruled_out for one in self.judged)

    @property
    def looked_at(self) -> int:
        """Number of configurations evaluated one by one."""
        return sum(one.family.size for one in self.judged)

    @property
    def fitting(self) -> int:
        """Number of evaluated configurations that fit."""
        return sum(int(one.fits.sum()) for one in self.judged)

    @cached_property
    def front(self) -> list[TrainingPlan]:
        """Return the thinned Pareto front of speed and memory, from the fastest to the smallest."""
        timed = [one.fits & (one.tokens_per_s > 0) for one in self.judged]
        owner = np.repeat(np.arange(len(timed)), [int(some.sum()) for some in timed])
        index = np.concatenate([np.flatnonzero(some) for some in timed])
        speed = np.concatenate([one.tokens_per_s[some] for one, some in zip(self.judged, timed, strict=True)])
        size = np.concatenate([one.total_bytes[some] for one, some in zip(self.judged, timed, strict=True)])
        order = np.lexsort((size, -speed))
        least = np.append(np.inf, np.minimum.accumulate(size[order])[:-1])
        kept = [(self.judged[owner[number]], int(index[number])) for number in order[size[order] < least]]
        count = min(_FRONT, len(kept))
        chosen = sorted({round(number * (len(kept) - 1) / max(count - 1, 1)) for number in range(count)})
        return [plan_of(self.shape, self.cluster, self.clock, *kept[number]) for number in chosen]


def search(shape: ModelShape, cluster: Cluster, request: TrainingRequest, clock: StepClock | None = None) -> PlanSearch:
    """Search every configuration that the request leaves open. A clock of the same cluster reuses its cached times."""
    request = for_cluster(for_checkpoint(request, shape), cluster)
    check(request, shape, cluster)
    clock = clock or clock_of(shape, cluster, request.lengths)
    judged: list[Judged] = []
    for families in searches(shape, cluster, request):
        judged += explore(shape, cluster, clock, families)
        if any(one.fits.any() for one in judged):
            # Memory is short if the fastest plan recomputes or splits the model unasked: then offloading is tried, once.
            one, index = fastest(judged)
            plan = one.family.configuration.at(index)
            recomputes = plan.checkpoint != "none" and request.checkpoint is None
            spreads = any(getattr(plan, name) > 1 and getattr(request, name) is None for name in ("tp", "pp", "cp"))
            if not (recomputes or spreads) or any(other.family.offload != NO_OFFLOAD for other in judged):
                break
    if not judged:
        hint = "Leave one of --tp, --pp, --cp, --ep, --zero, --framework, --offload out."
        raise BadLayout("No layout satisfies all of these flags together.", hint=hint)
    known = (shape, cluster, request, clock, judged)
    if not any(one.fits.any() for one in judged):
        closest = plan_of(shape, cluster, clock, *_closest(judged))
        return PlanSearch(*known, judged, None, closest)
    # With headroom, if any configuration has it.
    roomy = any(one.leaves_headroom.any() for one in judged)
    pool = [replace(one, fits=one.leaves_headroom) for one in judged] if roomy else judged
    best, *others = [plan_of(shape, cluster, clock, *item) for item in _ranked(pool, cluster)]
    quickest = plan_of(shape, cluster, clock, *fastest(comparable(pool, cluster)))
    return PlanSearch(*known, pool, best, best, others, quickest)


def _closest(judged: list[Judged]) -> tuple[Judged, int]:
    """Return the configuration that lacks least; among equals, the one that needs least memory on a GPU."""
    candidates: list[tuple[float, float, int, Judged, int]] = []
    for one in judged:
        index = int(np.lexsort((one.total_bytes, one.missing_bytes))[0])
        key = float(one.missing_bytes[index]), float(one.total_bytes[index]), len(candidates)
        candidates.append((*key, one, index))
    *_, closest, index = min(candidates)
    return closest, index


class _Ends(NamedTuple):
    """A family with the leanest and the fastest of its recomputation options, and those between them."""

    family: Family  # without layouts that are far too large
    judged: list[Judged]
    between: list[tuple[str, Loss]]
    lightest: tuple[str, Loss]
    least: NDArray[np.float64]  # tokens per second of each layout with full recomputation
    most: NDArray[np.float64]  # and without any
    roomy: NDArray[np.bool_]  # the leanest option leaves headroom


def explore(
    shape: ModelShape, cluster: Cluster, clock: StepClock, found: list[Family], worth_trying: float = _WORTH_TRYING
) -> list[Judged]:
    """Evaluate all families with all options of recomputation and loss, except those that cannot win.

    A layout is fastest without recomputation and slowest with all of it: options between are skipped if they would be
    far slower than what already fits, and so is recomputation that a layout does not need in order to fit.
    """
    ends = [_ends(shape, cluster, clock, family) for family in found]
    top = _top_speed([one for each in ends for one in each.judged])
    judged: list[Judged] = []
    for each in ends:
        lean, *others = each.judged
        ruled_out = lean.ruled_out + len(each.between) * each.most.size
        fitting = {each.lightest: others[0].leaves_headroom} if others else {}
        near, near_rows = each.family, np.ones(each.most.size, dtype=bool)
        for way in reversed(each.between):
            # If activations are offloaded, recomputing them may save time, and not recomputing may save memory.
            crosses = each.family.offload.activations != "gpu"
            fits_already = [fits for other, fits in fitting.items() if recomputes_less(other, way) and not crosses]
            # Layouts that reach about the top speed: seconds grow with the share of recomputed blocks.
            share, most_s = recomputed_share(way[0]), 1 / max(worth_trying * top, 1e-9)
            rows = ((1 - share) / each.most + share / each.least <= most_s) & ~np.logical_or.reduce(fits_already)
            rows = rows & each.roomy if top and not crosses else rows
            if not rows.any():
                continue
            if (rows != near_rows).any():  # the clock caches traffic by array identity
                near, near_rows = each.family.where(rows), rows
            one = judge(shape, cluster, clock, near.running(*way), timed="what leaves headroom" if top else "what fits")
            others.append(one)
            top = max(top, _top_speed([one]))
            ruled_out -= one.family.size
            fitting[way] = np.zeros_like(rows)
            fitting[way][rows] = one.leaves_headroom
        judged += [replace(lean, ruled_out=ruled_out), *others]
    return judged


def _top_speed(judged: list[Judged]) -> float:
    """Return the highest speed among those that fit and leave headroom."""
    speeds = (float(one.tokens_per_s[one.leaves_headroom].max()) for one in judged if one.leaves_headroom.any())
    return max(speeds, default=0.0)


def _ends(shape: ModelShape, cluster: Cluster, clock: StepClock, family: Family) -> _Ends:
    """Evaluate both ends, dropping layouts that cannot be loaded or are far too large in the leanest option."""
    leanest, *between = family.ways
    lean = judge(shape, cluster, clock, family)
    hopeful = lean.loads & (lean.total_bytes <= _HOPELESS * cluster.gpu.memory_bytes)
    lean = replace(lean, ruled_out=len(between) * int((~hopeful).sum()))
    if not between or not hopeful.any():
        nothing = np.zeros(0)
        return _Ends(family, [lean], [], leanest, nothing, nothing, nothing.astype(bool))
    near, lightest = family.where(hopeful), between.pop()
    light = judge(shape, cluster, clock, near.running(*lightest), timed="all")
    least, most = lean.tokens_per_s[hopeful], light.tokens_per_s
    if family.offload.activations != "gpu":
        # Recomputed activations are not offloaded: no option is faster than one that offloads nothing.
        here = replace(light.family.configuration, activation_place="gpu")
        most = _full(clock.step(here).tokens_per_s, light.family.size)
        least = most
    least = np.where(least > 0, least, most)
    return _Ends(near, [lean, light], between, lightest, least, most, lean.leaves_headroom[hopeful])


def judge(shape: ModelShape, cluster: Cluster, clock: StepClock, asked: Family, timed: Timed = "what fits") -> Judged:
    """Evaluate memory and speed of a family; speed only for the kind of configurations that `timed` names."""
    demands = demands_of(shape, asked.configuration, cluster)
    on_card, *_ = demands
    total_bytes = _full(on_card.needed_bytes, asked.size)
    missing_bytes = sum((demand.missing_bytes for demand in demands), start=np.zeros(asked.size))
    loads = are_met((demand for demand in demands if demand.while_loading), asked.size)
    fits = are_met(demands, asked.size)
    roomy = fits & (total_bytes <= (1 - HEADROOM) * cluster.gpu.memory_bytes)
    worth = {"all": True, "what fits": fits.any(), "what leaves headroom": roomy.any()}[timed]
    speed = _full(clock.step(asked.configuration).tokens_per_s if worth else 0.0, asked.size)
    return Judged(asked, total_bytes, missing_bytes, loads, fits, speed, roomy)


def _full(values: Quantity, size: int) -> NDArray[np.float64]:
    return np.broadcast_to(np.asarray(values, dtype=np.float64), (size,))


def _ranked(judged: list[Judged], cluster: Cluster) -> list[tuple[Judged, int]]:
    """Return the simplest of the fastest, then the best of other kinds by speed, except those outdone by another."""
    top = max(float(one.tokens_per_s[one.fits].max()) for one in judged if one.fits.any())
    found: list[tuple[float, float, Judged, int]] = []
    for one in judged:
        # In every layout the fastest that fits, or if as fast to a hundredth of the top speed, the smallest.
        steps, fitting = np.round(one.tokens_per_s / top, 2), np.flatnonzero(one.fits)
        numbers = one.family.configuration
        degrees = np.stack([numbers.tp, numbers.pp, numbers.cp, numbers.ep])[:, fitting]
        order = np.lexsort((one.total_bytes[fitting], -steps[fitting], *degrees))
        new = np.ones(order.size, dtype=bool)
        new[1:] = (np.diff(degrees[:, order], axis=1) != 0).any(axis=0)
        found += [(-steps[index], one.total_bytes[index], one, int(index)) for index in fitting[order[new]]]

    def kind(one: Judged, index: int) -> tuple[object, ...]:
        """Return the key by which plans look different to a reader: parallelism, recomputation and offload."""
        plan = one.family.configuration.at(index)
        return plan.zero, plan.tp, plan.pp, plan.cp, plan.ep, plan.checkpoint, one.family.offload

    def outdone(one: Judged, index: int, other: Judged, place: int) -> bool:
        """Say whether the other is as simple, needs about as little memory, and is about as fast or faster."""
        less = other.total_bytes[place] <= (1 + _AS_SMALL) * one.total_bytes[index]
        slower = other.tokens_per_s[place] < (1 - _AS_SMALL / 5) * one.tokens_per_s[index]
        burdens = [burden(each.family.configuration.at(row), cluster) for each, row in ((other, place), (one, index))]
        return bool(less and not slower and burdens[0] <= burdens[1])

    chosen = [simplest(judged, cluster)]
    for *_, one, index in sorted(found, key=itemgetter(0, 1)):
        if len(chosen) > _ALTERNATIVES:
            break
        if not any(kind(one, index) == kind(*other) or outdone(one, index, *other) for other in chosen):
            chosen.append((one, index))
    return chosen


def plan_of(shape: ModelShape, cluster: Cluster, clock: StepClock, one: Judged, index: int) -> TrainingPlan:
    """Return one configuration of a family with plain numbers."""
    config = one.family.configuration.at(index)
    budget = training_budget(shape, config, cluster.gpu)
    time = clock.step(config)
    ends: tuple[Literal["first", "last"], ...] = ("first", "last") if config.pp > 1 else ()
    sizes = (_sizes(training_budget(shape, config, cluster.gpu, stage=end)) for end in ends)
    own_sizes, loading = _sizes(budget), training_loading(shape, config, cluster)
    of_step = step_demands(own_sizes["total_bytes"], own_sizes["host_bytes"], own_sizes["drive_bytes"], cluster)
    return TrainingPlan(
        configuration=config,
        offload=one.family.offload,
        terms=budget.terms_at(0),
        ledger=budget.ledger_at(0),
        moment=budget.moment_at(0),
        parts_s={name: float(value) for name, value in time.parts.items()},
        hidden_s=float(time.hidden_s),
        tokens_per_s=float(time.tokens_per_s),
        sample_tokens=clock.sample_tokens or float(config.seq),
        loading=loading,
        demands=(*of_step, *loading.demands(cluster)),
        capacity_bytes=cluster.gpu.memory_bytes,
        host_capacity_bytes=cluster.host_memory_per_gpu_bytes,
        stages={f"{end} stage": size for end, size in zip(ends, sizes, strict=True)},
        **own_sizes,
    )


def _sizes(budget: TrainingBudget) -> dict[str, int]:
    names = ("peak_allocated_bytes", "peak_reserved_bytes", "total_bytes", "host_bytes", "pinned_bytes", "drive_bytes")
    return {name: round(float(np.ravel(getattr(budget, name))[0])) for name in names}


class BatchingChoice(NamedTuple):
    """A way to batch samples and its best plan; None if nothing fits."""

    batching: Batching
    plan: TrainingPlan | None


def batching_choices(findings: PlanSearch) -> list[BatchingChoice]:
    """Return every way to batch, each with its best plan."""
    shape, cluster, request = findings.shape, findings.cluster, findings.request
    if (lengths := request.lengths) is None:
        return []
    asked = {each: replace(request, lengths=replace(lengths, batching=each)) for each in BATCHINGS}
    others = {each: search(shape, cluster, asked[each]).best for each in BATCHINGS if each != lengths.batching}
    return [BatchingChoice(each, others.get(each, findings.best)) for each in BATCHINGS]
