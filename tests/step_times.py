"""Steps with a time, made by hand."""

from dataclasses import replace

from tonnage.clock.step import SteadyStep
from tonnage.clock.timeline import Span, StepTimeline, Task, timeline
from tonnage.hardware import find_gpu

LAYER = (
    ("native_layer_norm", "norm", 12e-6),
    ("mm", "matmul", 240e-6),
    ("_scaled_dot_product_flash_attention", "attention", 90e-6),
    ("gelu", "elementwise", 30e-6),
)


def step_of(layers: int, *, host_s: float = 20e-6, copies: bool = False, **words) -> SteadyStep:
    """A step of some layers; with copies on a stream of their own where asked."""
    tasks = [Task(name, kind, seconds, host_s) for _ in range(layers) for name, kind, seconds in LAYER]
    if copies:
        tasks[8::8] = [Task("copy_", "copy", 60e-6, host_s, stream=7, awaits=("before",)) for _ in tasks[8::8]]
        tasks[7::8] = [replace(task, records="before") for task in tasks[7::8]]
    tasks.append(Task("_fused_adamw_", "optimizer", 2e-3, host_s))
    return timed(timeline(tasks), **words)


def step_with(*spans: Span, step_s: float = 0.02, **words) -> SteadyStep:
    """A step of just these launches; where there are none the card waits."""
    by_kind: dict[str, float] = {}
    for span in spans:
        by_kind[span.kind] = by_kind.get(span.kind, 0.0) + span.end_s - span.start_s
    idle_s = max(0.0, step_s - sum(by_kind.values()))
    return timed(StepTimeline(step_s=step_s, host_s=step_s, spans=spans, by_kind=by_kind, idle_s=idle_s), **words)


def timed(found: StepTimeline, **words) -> SteadyStep:
    """On an H200, within a tenth."""
    values = {"low_s": 0.9 * found.step_s, "high_s": 1.1 * found.step_s, "samples": 8, "tokens": 8192}
    return SteadyStep(gpu=find_gpu("h200"), timeline=found, **(values | {"operations": 1e12, "rate": 989e12} | words))
