"""How long one captured step takes on a GPU: its calls become launches, and launches a timeline behind the host."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from tonnage.clock import kernels
from tonnage.clock.captured import READS_BACK, CallInStep, CapturedCall, CapturedStep
from tonnage.clock.host import OPTIMIZER, host_costs
from tonnage.clock.kernels import copies
from tonnage.clock.kernels.matmul import goes_one_by_one
from tonnage.clock.launch import Launch, Settings
from tonnage.clock.power import slowdown
from tonnage.clock.ranges import factors
from tonnage.clock.streams import CollectiveSeconds, Streams
from tonnage.clock.timeline import StepTimeline, Task, steady_s, timeline
from tonnage.hardware import Gpu

WAITING = "waiting for the host"
_ARITHMETIC = ("matmul", "attention", "convolution", "recurrent")
_BESIDE = ("copy", "collective")  # these draw little power on separate streams
_WITHOUT_TENSOR_CORES = ("fp32", "fp64")  # these do not reach a GPU's power limit


@dataclass(frozen=True, kw_only=True)
class SteadyStep:
    """A step in the steady state, and the range in which nine of ten such steps lie."""

    gpu: Gpu
    timeline: StepTimeline
    low_s: float
    high_s: float
    samples: int | None
    tokens: int | None
    operations: float  # of matrix products, attention and convolutions
    rate: float  # the GPU's, in the precision of most of them

    @property
    def step_s(self) -> float:
        """Seconds of one step."""
        return self.timeline.step_s

    @property
    def share_of_peak(self) -> float | None:
        """Share of the GPU's rate in the precision of most of the arithmetic."""
        return self.operations / self.step_s / self.rate if self.rate and self.step_s else None

    @property
    def time_by_kind(self) -> dict[str, float]:
        """GPU seconds by kind of kernel, most first, and those waiting for the host."""
        return self.timeline.by_kind | {WAITING: self.timeline.idle_s}


def step_time(step: CapturedStep, gpu: Gpu, collective_s: CollectiveSeconds | None = None) -> SteadyStep:
    """Predict a captured step on this GPU; without `collective_s`, collectives take no time."""
    launched = list(launches_of(step, settings_of(step)))
    tasks = within_power(list(_tasks(launched, gpu, step.optimizer_parameters, collective_s)))
    by_precision: defaultdict[str, float] = defaultdict(float)
    for _, launch in launched:
        if launch is not None and launch.kind in _ARITHMETIC:
            by_precision[launch.precision] += launch.operations
    low_s, high_s = (steady_s(tasks, card, host) for card, host in factors(gpu))
    rate = gpu.rates.get(max(by_precision, key=by_precision.__getitem__, default=""), 0.0)
    return SteadyStep(
        gpu=gpu, timeline=timeline(tasks), low_s=low_s, high_s=high_s, samples=step.samples, tokens=step.tokens,
        operations=sum(by_precision.values()), rate=rate,
    )  # fmt: skip


def busy_s(step: CapturedStep, gpu: Gpu, collective_s: CollectiveSeconds | None = None) -> tuple[float, float]:
    """Return the GPU's seconds for all kernels, and the host's for launching them, if neither waits for the other."""
    launched = launches_of(step, settings_of(step))
    tasks = within_power(list(_tasks(launched, gpu, step.optimizer_parameters, collective_s)))
    ahead = [replace(task, host_s=0.0, synchronizes=False) for task in tasks]
    return timeline(ahead, warm_steps=0).step_s, sum(task.host_s for task in tasks)


def within_power(tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks slowed down by the GPU's power limit."""
    drawing = ((task.seconds, task.share) for task in tasks if not (task.stream and task.kind in _BESIDE))
    slower = slowdown(drawing, sum(task.host_s for task in tasks))
    return [replace(task, seconds=task.seconds * slower) if task.share and slower > 1.0 else task for task in tasks]


def settings_of(step: CapturedStep) -> Settings:
    """Return the arithmetic settings of the captured step."""
    matmul, convolution = (step.settings.get(name) for name in ("matmul_tf32", "cudnn_tf32"))
    return Settings(tf32_matmul=matmul == "True", tf32_convolution=convolution != "False")


def launches_of(step: CapturedStep, settings: Settings) -> Iterator[tuple[CallInStep, Launch | None]]:
    """Yield every call with what it launches itself.

    Builds of torch differ in which inner operators they record, and autocast calls an operator again with narrower
    arguments. So a composite operator counts only if nothing within it launches anything, and any other only if it is
    not called again.
    """
    moments = list(step.moments())
    # What each distinct call launches; nothing for one that stays on the host. Only the gradients of `index` record its
    # number of rows.
    rows = {
        call.shapes[0]: prod(call.shapes[2]) // max(1, prod(call.shapes[0][1:]))
        for call in step.calls
        if call.name == "_index_put_impl_" and len(call.shapes) > 2 and call.shapes[2]
    }
    launches: list[Launch | None] = []
    for call in step.calls:
        if call.name == "index" and call.shapes[0] in rows:
            call = replace(call, shapes=(call.shapes[0], ((rows[call.shapes[0]],),)))
        if call.kind not in ("operator", "kernel") or not call.on_card:
            launches.append(None)
        elif crosses(call):
            size = prod(call.shapes[1]) * call.element_bytes(1)
            direction: copies.Direction = "to_device" if call.devices[0] == "cuda" else "to_host"
            launches.append(copies.transfer(size, direction, pinned="pinned" in call.devices[:2]))
        else:
            launches.append(kernels.launch_of(call, settings))
    found = [launches[number] for number in step.sequence]
    within: dict[int, set[str]] = {}  # names of launching operators within each caller
    for place in reversed(range(len(moments))):
        moment = moments[place]
        inner = within.pop(place, None)
        if inner and kernels.is_done_within(moment.call.name, inner):
            found[place] = None
        if moment.parent is not None and (inner or found[place]):
            above = within.setdefault(moment.parent, set())
            above.update(inner or ())
            if found[place]:
                above.add(moment.call.name)
    return zip(moments, found, strict=True)


def _tasks(
    launched: Iterable[tuple[CallInStep, Launch | None]], gpu: Gpu, parameters: int,
    collective_s: CollectiveSeconds | None = None,
) -> Iterator[Task]:  # fmt: skip
    """Yield the host's work up to each launch, and the launch; an optimizer first visits all its parameters."""
    costs, streams = host_costs(), Streams(collective_s)
    on_card: dict[int, tuple[float, float]] = {}  # by launch id: those of one distinct call are the same
    waiting_s = 0.0
    phase = ""
    compiled = False
    for moment, launch in launched:
        call = moment.call
        if call.is_compiled and not compiled:
            compiled = True
            waiting_s += parameters * costs.compiled_parameter
        if moment.phase != phase:
            phase = moment.phase
            waiting_s += costs.optimizer_s(parameters) if phase == OPTIMIZER else 0.0
        waiting_s += costs.call_s(moment)
        if call.kind in ("stream", "collective"):
            yield from streams.tasks(moment, waiting_s)
            waiting_s = 0.0
            continue
        stream, synchronizes = streams.of(moment), reads_back(call)
        if launch is None:
            if synchronizes:
                yield Task(call.name, "copy", host_s=waiting_s, stream=stream, synchronizes=True)
                waiting_s = 0.0
            continue
        kind = OPTIMIZER if moment.phase == OPTIMIZER else launch.kind
        if goes_one_by_one(call):
            yield Task(call.name, "copy", host_s=waiting_s, stream=stream, synchronizes=True)
            waiting_s = 0.0
        launching_s = costs.launch_s(moment, launch)
        waiting_s += launching_s
        if id(launch) not in on_card:
            # Seconds, and the attained share of the tensor cores' peak rate.
            on_card_s = float(kernels.seconds(launch, gpu))
            on_tensor_cores = launch.kind in _ARITHMETIC and launch.precision not in _WITHOUT_TENSOR_CORES
            rate = gpu.rates.get(launch.precision, 0.0) if on_tensor_cores else 0.0
            reached = launch.operations / on_card_s / rate if rate and on_card_s else 0.0
            on_card[id(launch)] = on_card_s, reached
        seconds, share = on_card[id(launch)]
        yield Task(
            call.name, kind, seconds, waiting_s, launch.kernels, launching_s * (1 - 1 / launch.kernels), stream,
            awaits=streams.awaited(moment), synchronizes=synchronizes, share=share,
        )  # fmt: skip
        waiting_s = 0.0
    if waiting_s:
        yield Task("", "host", host_s=waiting_s)


def crosses(call: CapturedCall) -> bool:
    """Say whether it is a copy between host and GPU."""
    sides = call.devices[:2]
    return call.name == "copy_" and "cuda" in sides and ("cpu" in sides or "pinned" in sides)


def reads_back(call: CapturedCall) -> bool:
    """Say whether the host must wait for the GPU's result before it goes on.

    A copy to or from host memory is waited for, unless it is non-blocking and the memory is pinned.
    """
    if call.name == "copy_":
        return crosses(call) and not (call.value(2) in ("True", "1") and "pinned" in call.devices[:2])
    return call.name in READS_BACK and call.on_card
