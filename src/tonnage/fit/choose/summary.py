"""Describe a plan: what each technique saves and costs, as the difference at the point where it was added.

Nothing is measured here. The text fits 80 columns.
"""

import textwrap
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from tonnage.fit.choose.choosing import peak_of
from tonnage.fit.choose.placement import PLAIN, Placement, ResidentState
from tonnage.fit.choose.solver import Solution, block_modes, outside_at
from tonnage.fit.plan import FitPlan, TechniqueRow
from tonnage.fit.prove.rehearsal import Rehearsed
from tonnage.fit.survey.profile import BlockProfile, OutsideProfile
from tonnage.fit.survey.survey import BLOCK, BLOCK_OFFLOAD, KEEP, OFFLOAD, OPERATORS, Survey
from tonnage.fit.technique import Technique
from tonnage.fit.techniques.activation_offload import ActivationOffload
from tonnage.units import format_bytes

Cost = tuple[int, float]  # peak bytes, seconds of a step
_MOST_TIMES = 8  # largest ratio of rows to measured rows for which a time is meaningful
_SHOWN_S = 0.5e-3  # summaries show whole milliseconds
_WITHOUT_LINK = {BLOCK_OFFLOAD: BLOCK, OFFLOAD: KEEP}


def plain_cost(survey: Survey, resident: ResidentState, among: Collection[int] = ()) -> Cost:
    """Return the cost of the whole batch at once, unchanged, from the measured sizes (or those `among` them).

    Seconds scale with the largest size, as a card is slow with few rows; bytes also use the smallest.
    """
    sizes = {rows: size for rows, size in survey.measured.items() if not among or rows in among}
    small, largest = sizes[min(sizes)], sizes[max(sizes)]
    few, many, rows = small.rows, largest.rows, survey.rows

    def scaled(below: int, above: int) -> int:
        if few == many:
            return round(above * rows / many)
        return max(0, round(above + (above - below) / (many - few) * (rows - many)))

    taken, names = [], ("kept_bytes", "forward_peak_bytes", "backward_peak_bytes")
    for (below, *_), (above, *_) in zip(small.modes(offload=False), largest.modes(offload=False), strict=True):
        found: dict[str, Any] = {name: scaled(getattr(below, name), getattr(above, name)) for name in names}
        share = rows / many
        taken.append(replace(above, forward_s=above.forward_s * share, backward_s=above.backward_s * share, **found))
    return _step_cost(taken, outside_at(sizes, survey.rows), PLAIN, resident, 1)


def is_telling(survey: Survey) -> bool:
    """Return whether enough rows were measured to estimate the time of the whole batch."""
    return max(survey.measured, default=0) >= enough_rows(survey.rows)


def enough_rows(rows: int) -> int:
    """Return how many rows are representative of a batch."""
    return -(-rows // _MOST_TIMES)


def _cost(
    survey: Survey, solution: Solution, placement: Placement, resident: ResidentState, names: Sequence[str] = ()
) -> Cost:
    """Return the cost of the solution's layout with another placement and these modes, by default unchanged blocks."""
    layout = solution.layout
    modes = block_modes(survey.sizes[solution.profiled_rows], layout, offload=False)
    wanted = zip(modes, names or [KEEP] * len(modes), strict=True)
    taken = [next((mode for mode in ways if mode.name == name), ways[0]) for ways, name in wanted]
    outside = outside_at(survey.sizes, layout.rows, survey.outside)
    return _step_cost(taken, outside, placement, resident, layout.micro_batches)


def _step_cost(
    taken: list[BlockProfile], outside: OutsideProfile, placement: Placement, resident: ResidentState, count: int
) -> Cost:
    """Return the cost of a step of `count` micro-batches."""
    backward_s = sum(mode.backward_s for mode in taken)
    around = placement.memory_context(resident, outside, 0, count, backward_s=backward_s)
    gpu_s = sum(mode.forward_s for mode in taken) + backward_s + outside.forward_s + outside.backward_s
    host_s = sum(mode.host_s for mode in taken) + outside.forward_host_s + outside.backward_host_s
    seconds = max(gpu_s, host_s) * count
    return peak_of(taken, around), seconds + placement.step_overhead_s(resident, count, backward_s)


def summary_rows(
    stages: Sequence[tuple[str, Survey]], resident: ResidentState, solution: Solution, techniques: Sequence[Technique]
) -> tuple[TechniqueRow, ...]:
    """Return one row per technique, in the order in which they were added."""
    survey = stages[-1][1]
    titles = {technique.name: technique for technique in techniques}
    rows = [_stage_row(titles[name], before, stage, resident) for (_, before), (name, stage) in pairwise(stages)]
    before = plain_cost(survey, resident)
    layout = solution.layout
    if layout.micro_batches > 1:
        after = _cost(survey, solution, PLAIN, resident)
        why = f"{layout.micro_batches} of {layout.rows} rows: activations of one at a time, gradients stay between them"
        rows.append(_row(titles["micro-batches"], before, after, why))
        before = after
    final, choice = (solution.peak_bytes, solution.step_s), solution.choice
    rest = [t for t in techniques if t.name in ("recompute", "activation-offload", "host-states", "step-in-backward")]
    for technique in rest:
        last = technique is rest[-1]
        if technique.name == "recompute":
            staying = [_WITHOUT_LINK.get(name, name) for name in choice.modes]
            after = final if last else _cost(survey, solution, PLAIN, resident, staying)
            shown = Counter("by operator" if name.startswith(OPERATORS) else name for name in choice.modes)
            counts = ", ".join(f"{count} {name}" for name, count in shown.items())
            why = f"the fastest choice of modes within the budget: {counts}"
        elif isinstance(technique, ActivationOffload):
            blocks = [survey.sizes[solution.profiled_rows].kept(name) for name in technique.blocks]
            moved = sum(block.kept_bytes if technique.what == "kept" else block.input_bytes for block in blocks)
            after = final if last else (before[0] - layout.slices * moved, before[1])
            why = f"of {len(blocks)} blocks {technique.what}: crosses the link behind the computation"
        else:  # where gradients and states are
            after = final if last else _cost(survey, solution, solution.placement, resident, choice.modes)
            why = "each gradient is gone as soon as it is made"
            if technique.name == "host-states":
                moved_words = format_bytes(resident.states_bytes - solution.states_on_gpu_bytes)
                why = f"{moved_words} of states on the host, {choice.exposed_states_s:.2f} s of their copies not hidden"
        rows.append(_row(technique, before, after, why))
        before = after
    return tuple(rows)


def _stage_row(technique: Technique, before: Survey, after: Survey, resident: ResidentState) -> TechniqueRow:
    both = before.measured.keys() & after.measured.keys()
    row = _row(technique, plain_cost(before, resident, both), plain_cost(after, resident, both), "")
    measured, rows = max(both or after.measured), after.rows
    how = "on the whole batch" if measured == rows else f"on {measured} of {rows} rows, in proportion for the rest"
    # What it is worth.
    changes: list[tuple[float, str]] = [(row.saved_bytes, format_bytes(abs(row.saved_bytes)))]
    if abs(row.seconds) >= _SHOWN_S:
        changes.append((-row.seconds, time_words(abs(row.seconds))))
    gains = " and ".join(words for saved, words in changes if saved > 0)
    losses = " and ".join(words for saved, words in changes if saved < 0)
    worth = f"pays: it saves {gains}" if gains else "makes no difference here"
    if losses:
        worth = f"kept, though it costs {losses} here: without={[row.name]} leaves it out"
        worth = f"kept: it saves {gains} and costs {losses}" if gains else worth
    return replace(row, why=f"{worth}; measured {how}")


def _row(technique: Technique, before: Cost, after: Cost, why: str) -> TechniqueRow:
    return TechniqueRow(technique.name, technique.title, before[0] - after[0], after[1] - before[1], why)


# In words -------------------------------------------------------------------------------------------------------------


def summary(plan: FitPlan, measured: Rehearsed | None) -> str:
    """Describe a plan: before, technique by technique, after."""
    title = f"{plan.device} · batch of {plan.batch_rows} · budget {format_bytes(plan.budget_bytes)}"
    lines = [title, "", _line("", "peak", "step")]
    if plan.plain_peak_bytes:
        seconds = time_words(plan.plain_step_s) if plan.plain_step_s else ""
        lines.append(_line("plain", format_bytes(plan.plain_peak_bytes), seconds))
    else:
        lines += [_line("plain", "does not fit", ""), *_indented("not even one row of it")]
    for row in plan.rows:
        size = _signed(-row.saved_bytes, format_bytes(abs(row.saved_bytes)))
        lines.append(_line(f"  {row.title}", size, _signed(row.seconds, time_words(abs(row.seconds)))))
        lines += _indented(row.why)
    lines.append(_line("fitted, predicted", format_bytes(plan.peak_bytes), time_words(plan.step_s)))
    if measured is not None:
        seconds = "" if measured.step_s is None else time_words(measured.step_s)
        lines.append(_line("fitted, measured", format_bytes(measured.peak_reserved_bytes), seconds, "reserved"))
    if plan.host_bytes:
        lines.append(f"host memory {format_bytes(plan.host_bytes)} of {format_bytes(plan.host_budget_bytes)}, pinned")
    return "\n".join(lines)


def _indented(words: str) -> list[str]:
    return textwrap.wrap(words, 80, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False)


def _line(name: str, size: str, seconds: str, note: str = "") -> str:
    return f"{name:<38}{size:>14}{seconds:>14}  {note}".rstrip()


def _signed(value: float, words: str) -> str:
    return words if words == "0 ms" else ("−" if value < 0 else "+") + words


def time_words(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"
