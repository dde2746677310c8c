"""The fastest configuration that fits, the next best of another kind, the front of time against memory, and why others lost.

Every family is one array of configurations through the same formulas that answer for one. Offload is looked at where nothing
fits without it: the link to the host is a hundredth as fast as the card's own memory. This module does not know words.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from tonnage.budget.configuration import Configuration, Quantity
from tonnage.budget.step_time import StepClock
from tonnage.budget.terms import Term
from tonnage.budget.training import TrainingBudget, needed_bytes, training_budget
from tonnage.errors import BadLayout
from tonnage.hardware.cluster import Cluster
from tonnage.ledger import Ledger
from tonnage.models.shape import ModelShape
from tonnage.planner.request import Offload, TrainingRequest, check, for_checkpoint, for_cluster
from tonnage.planner.space import Family, Sharding, family, layouts, offloads, passes, shardings

# A configuration that needs this much less is worth showing beside a faster one.
_AS_SMALL = 0.05
# A layout that needs this much of the card in its leanest form is not tried in others.
_HOPELESS = 1.1
# A plan leaves this share of the card free where any can: what reserved memory is predicted to within, more or less.
HEADROOM = 0.05
_ALTERNATIVES = 4
_FRONT = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """One configuration in plain numbers, with what it needs of one GPU and how long a step takes."""

    configuration: Configuration
    offload: Offload
    terms: tuple[Term, ...]
    ledger: Ledger
    moment: str  # of the peak
    peak_allocated_bytes: int
    total_bytes: int
    host_bytes: int
    pinned_bytes: int
    capacity_bytes: int
    host_capacity_bytes: int
    parts_s: dict[str, float]
    hidden_s: float
    tokens_per_s: float

    @property
    def sequences_per_s(self) -> float:
        """Of all GPUs together."""
        return float(self.tokens_per_s / self.configuration.seq)

    @property
    def step_time_s(self) -> float:
        """Of one optimizer step."""
        return sum(self.parts_s.values())

    @property
    def fits(self) -> bool:
        """On the card and in the host."""
        return self.total_bytes <= self.capacity_bytes and self.host_bytes <= self.host_capacity_bytes


@dataclass(frozen=True, slots=True)
class Judged:
    """A family with what came out: one number for each configuration. What does not fit is not timed: its speed is 0."""

    family: Family
    total_bytes: NDArray[np.float64]
    fits: NDArray[np.bool_]
    tokens_per_s: NDArray[np.float64]
    ruled_out: int = 0  # configurations that need more than one of these, which is too large already


@dataclass(frozen=True)
class Findings:
    """All that was searched."""

    shape: ModelShape
    cluster: Cluster
    request: TrainingRequest
    clock: StepClock
    judged: list[Judged]
    pool: list[Judged]  # the same, in which only what leaves headroom fits: what plans are chosen from
    best: Plan | None
    closest: Plan  # the best where one fits, else what needs least
    alternatives: list[Plan] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        """Whether anything does."""
        return self.best is not None

    @property
    def searched(self) -> int:
        """How many configurations were looked at, or ruled out by one that needs less."""
        return sum(one.family.size + one.ruled_out for one in self.judged)

    @property
    def fitting(self) -> int:
        """How many of them fit."""
        return sum(int(one.fits.sum()) for one in self.judged)

    @cached_property
    def front(self) -> list[Plan]:
        """Pareto: nothing that fits is both faster and smaller. From the fastest to the smallest, thinned."""
        owner = np.concatenate([np.full(int(one.fits.sum()), number) for number, one in enumerate(self.judged)])
        index = np.concatenate([np.flatnonzero(one.fits) for one in self.judged])
        speed = np.concatenate([one.tokens_per_s[one.fits] for one in self.judged])
        size = np.concatenate([one.total_bytes[one.fits] for one in self.judged])
        order = np.lexsort((size, -speed))
        least = np.minimum.accumulate(size[order])
        smaller = np.ones(order.size, dtype=bool)
        smaller[1:] = size[order][1:] < least[:-1]
        kept = [(self.judged[owner[number]], int(index[number])) for number in order[smaller]]
        count = min(_FRONT, len(kept))
        chosen = sorted({round(number * (len(kept) - 1) / max(count - 1, 1)) for number in range(count)})
        return [plan_of(self.shape, self.cluster, self.clock, *kept[number]) for number in chosen]


def search(shape: ModelShape, cluster: Cluster, request: TrainingRequest) -> Findings:
    """Look at every configuration that the request leaves open."""
    request = for_cluster(for_checkpoint(request, shape), cluster)
    check(request, shape, cluster)
    rows = layouts(shape, cluster, request)
    if not rows.tp.size:
        raise BadLayout(
            "No layout satisfies all of these flags together.", hint="Leave one of --tp, --pp, --cp, --ep out."
        )
    clock = StepClock(shape, cluster)
    judged: list[Judged] = []
    for choices in offloads(request):
        for sharding in (sharding for offload in choices for sharding in shardings(request, rows, offload)):
            judged += _judge_passes(shape, cluster, clock, request, sharding)
        if any(one.fits.any() for one in judged):
            break
    return _findings(shape, cluster, request, clock, judged)


def _judge_passes(
    shape: ModelShape, cluster: Cluster, clock: StepClock, request: TrainingRequest, sharding: Sharding
) -> list[Judged]:
    """All ways of recomputation and loss. Layouts that are far too large in the leanest are not tried in the others."""
    leanest, *others = passes(request, sharding.offload)
    first = judge(shape, cluster, clock, family(request, sharding, *leanest))
    hopeful = first.total_bytes <= _HOPELESS * cluster.gpu.memory_bytes
    if not hopeful.any():
        return [replace(first, ruled_out=len(others) * hopeful.size)]
    near = sharding.where(hopeful)
    rest = [judge(shape, cluster, clock, family(request, near, *choice)) for choice in others]
    return [replace(first, ruled_out=len(others) * int((~hopeful).sum())), *rest]


def judge(shape: ModelShape, cluster: Cluster, clock: StepClock, asked: Family) -> Judged:
    """What the configurations of one family need, and how fast they are."""
    total_bytes, host_bytes = (
        _full(size, asked.size) for size in needed_bytes(shape, asked.configuration, cluster.gpu)
    )
    fits = (total_bytes <= cluster.gpu.memory_bytes) & (host_bytes <= cluster.host_memory_per_gpu_bytes)
    speed = _full(clock.step(asked.configuration).tokens_per_s if fits.any() else 0.0, asked.size)
    return Judged(asked, total_bytes, fits, speed)


def _full(values: Quantity, size: int) -> NDArray[np.float64]:
    return np.broadcast_to(np.asarray(values, dtype=np.float64), (size,))


def _findings(
    shape: ModelShape, cluster: Cluster, request: TrainingRequest, clock: StepClock, judged: list[Judged]
) -> Findings:
    if any(one.fits.any() for one in judged):
        pool = _roomy(judged, cluster.gpu.memory_bytes)
        best, *others = [plan_of(shape, cluster, clock, *item) for item in _ranked(pool)]
        return Findings(shape, cluster, request, clock, judged, pool, best, best, others)
    smallest = min(judged, key=lambda one: one.total_bytes.min())
    closest = plan_of(shape, cluster, clock, smallest, int(smallest.total_bytes.argmin()))
    return Findings(shape, cluster, request, clock, judged, judged, None, closest)


def _roomy(judged: list[Judged], capacity_bytes: int) -> list[Judged]:
    """With headroom, where anything has it."""
    most_bytes = (1 - HEADROOM) * capacity_bytes
    pool = [replace(one, fits=one.fits & (one.total_bytes <= most_bytes)) for one in judged]
    return pool if any(one.fits.any() for one in pool) else judged


def _ranked(judged: list[Judged]) -> list[tuple[Judged, int]]:
    """The best, then the best of other kinds, fastest first; nothing that asks for more and gives no more."""
    top = max(float(one.tokens_per_s[one.fits].max()) for one in judged if one.fits.any())
    found: list[tuple[float, float, Judged, int]] = []
    for one in judged:
        steps = _steps(one, top)
        found += [(-steps[index], one.total_bytes[index], one, index) for index in _leaders(one, steps)]
    chosen = [_fastest(judged)]
    for *_, one, index in sorted(found, key=itemgetter(0, 1)):
        item = one, index
        if len(chosen) > _ALTERNATIVES:
            break
        if not any(_kind(*item) == _kind(*other) or _outdone(item, other) for other in chosen):
            chosen.append(item)
    return chosen


def _fastest(judged: list[Judged]) -> tuple[Judged, int]:
    """Of the equally fast, the one that asks least of whoever runs it."""
    speeds = [np.where(one.fits, one.tokens_per_s, -np.inf) for one in judged]
    top = max(float(speed.max()) for speed in speeds)
    equal = [(one, int(i)) for one, speed in zip(judged, speeds, strict=True) for i in np.flatnonzero(speed == top)]
    return min(equal, key=lambda item: _effort(*item))


def _outdone(item: tuple[Judged, int], other: tuple[Judged, int]) -> bool:
    """The other asks for no more of anyone, and needs about as little."""
    less = other[0].total_bytes[other[1]] <= (1 + _AS_SMALL) * item[0].total_bytes[item[1]]
    return bool(less) and _effort(*other)[:2] <= _effort(*item)[:2]


def _leaders(one: Judged, steps: NDArray[np.float64]) -> list[int]:
    """The best that fits of every layout of a family: the fastest, among them the one that needs least."""
    numbers = one.family.configuration
    chosen = np.flatnonzero(one.fits)
    degrees = np.stack([numbers.tp, numbers.pp, numbers.cp, numbers.ep])[:, chosen]
    order = np.lexsort((one.total_bytes[chosen], -steps[chosen], *degrees))
    new = np.ones(order.size, dtype=bool)
    new[1:] = (np.diff(degrees[:, order], axis=1) != 0).any(axis=0)
    return [int(index) for index in chosen[order[new]]]


def _steps(one: Judged, top: float) -> NDArray[np.float64]:
    """Speeds to a hundredth of the fastest: less is no difference."""
    return np.round(one.tokens_per_s / top, 2)


def _kind(one: Judged, index: int) -> tuple[object, ...]:
    """What makes two plans different to a reader: how the model is spread, and what is recomputed or offloaded."""
    numbers = one.family.configuration.at(index)
    return numbers.zero, numbers.tp, numbers.pp, numbers.cp, numbers.ep, numbers.checkpoint, one.family.offload


def _effort(one: Judged, index: int) -> tuple[int, int, float]:
    """How much a configuration asks of whoever runs it; then what it needs."""
    numbers = one.family.configuration.at(index)
    spread = sum(bool(degree > 1) for degree in (numbers.tp, numbers.pp, numbers.cp, numbers.ep))
    hybrid = numbers.zero > 0 and bool(numbers.shard < numbers.data)
    changes = (numbers.checkpoint != "none", numbers.loss == "chunked", numbers.zero > 0, hybrid)
    return spread, sum(changes), float(one.total_bytes[index])


def plan_of(shape: ModelShape, cluster: Cluster, clock: StepClock, one: Judged, index: int) -> Plan:
    """One configuration of a family, in plain numbers."""
    configuration = one.family.configuration.at(index)
    budget = training_budget(shape, configuration, cluster.gpu)
    time = clock.step(configuration)
    return Plan(
        configuration=configuration,
        offload=one.family.offload,
        terms=budget.terms_at(0),
        ledger=budget.ledger_at(0),
        moment=budget.moment_at(0),
        parts_s={name: float(value) for name, value in time.parts.items()},
        hidden_s=float(time.hidden_s),
        tokens_per_s=float(time.tokens_per_s),
        capacity_bytes=cluster.gpu.memory_bytes,
        host_capacity_bytes=cluster.host_memory_per_gpu_bytes,
        **_sizes(budget),
    )


def _sizes(budget: TrainingBudget) -> dict[str, int]:
    names = ("peak_allocated_bytes", "total_bytes", "host_bytes", "pinned_bytes")
    return {name: round(float(np.ravel(getattr(budget, name))[0])) for name in names}
