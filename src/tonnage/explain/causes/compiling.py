"""The first step needs more than those after it: compilation, autotuning and algorithm search try their kernels out."""

from tonnage.explain.case import Case
from tonnage.explain.findings import Finding, guilty_lines
from tonnage.explain.fixes import Fix
from tonnage.units import format_bytes

_TIMES = 1.05


def compile_peak(case: Case) -> Finding | None:
    """The excess of the first step over the largest later one, with what only the first had."""
    steps = [step for step in case.recording.steps if step.step]
    if len(steps) < 2 or case.death:
        return None
    later = max(step.peak_allocated_bytes for step in steps[1:])
    excess = steps[0].peak_allocated_bytes - later
    if excess < (_TIMES - 1) * later:
        return None
    once = [a for a in case.live if a.step == steps[0].step and a.died is not None]
    sentence = (
        f"the first step needed {format_bytes(excess)} more than any later one: kernels were tried out, or compiled"
    )
    how = "torch.backends.cudnn.benchmark=False, max_autotune=False, or one step with a small batch first"
    fix = Fix("no trials at full size", excess, "perhaps slower kernels", how)
    return Finding("first-step-peak", sentence, excess, lines=guilty_lines(once), fixes=(fix,))
