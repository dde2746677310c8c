"""Steps with a time, made by hand."""

from tonnage.clock.step import StepTime
from tonnage.clock.timeline import Task, timeline
from tonnage.hardware import find_gpu

LAYER = (
    ("native_layer_norm", "norm", 12e-6),
    ("mm", "matmul", 240e-6),
    ("_scaled_dot_product_flash_attention", "attention", 90e-6),
    ("gelu", "elementwise", 30e-6),
)


def step_of(layers: int, *, host_s: float = 20e-6, copies: bool = False, **words) -> StepTime:
    """A step of some layers; with copies on a stream of their own where asked."""
    tasks = [Task(name, kind, seconds, host_s) for _ in range(layers) for name, kind, seconds in LAYER]
    if copies:
        tasks[8::8] = [Task("copy_", "copy", 60e-6, host_s, stream=7, awaits=(0,)) for _ in tasks[8::8]]
    tasks.append(Task("_fused_adamw_", "optimizer", 2e-3, host_s))
    found = timeline(tasks)
    values = {"low_s": 0.9 * found.step_s, "high_s": 1.1 * found.step_s, "samples": 8, "tokens": 8192}
    return StepTime(gpu=find_gpu("h200"), timeline=found, **(values | {"operations": 1e12, "rate": 989e12} | words))
