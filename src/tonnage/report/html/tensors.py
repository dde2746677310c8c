"""The largest tensors at the peak: what they are, where they were made, and how long they live."""

from bisect import bisect_right
from collections.abc import Callable

from tonnage.recording import Allocation, Group, Recording, alike_with_members
from tonnage.recording.timeline import spans
from tonnage.report.html import markup
from tonnage.report.html.markup import size, text

ROWS = 30
MEMBERS = 12
FRAMES = 32
_BAR_UNITS = 1000

Place = Callable[[int], str]


def tensors_section(recording: Recording) -> str:
    """A row for each kind of tensor; a row opens to its stack and to each tensor's lifetime."""
    groups = alike_with_members(recording.live_at_peak)
    length = len(recording.timeline.allocated_bytes)
    place = places(recording)
    rows = [_cells(group, members, length, place) for group, members in groups[:ROWS]]
    rest = groups[ROWS:]
    columns = ("each", "", "sum", "what", "made by", "module", "line", "lives")
    parts = [markup.table(columns, rows, name="largest-tensors", numbers=(0, 1, 2))]
    if rest:
        total = sum(group.total_bytes for group, _ in rest)
        parts.append(f'<p class="note">and {len(rest):,} smaller kinds, {size(total)} together</p>')
    note = "The same tensor of every layer is one row. Open a row for its stack and the life of each."
    return markup.section("Largest tensors at the peak", *parts, name="tensors", note=note)


def places(recording: Recording) -> Place:
    """Words for where in the run an event lies: "step 2, backward"."""
    length = len(recording.timeline.allocated_bytes)
    steps = [
        (start, f"step {name}" if name not in ("", "0") else "")
        for name, start, _ in spans(recording.marks, "step", length)
    ]
    phases = [(start, name) for name, start, _ in spans(recording.marks, "phase", length)]

    def place(event: int) -> str:
        return ", ".join(filter(None, (_latest(steps, event), _latest(phases, event))))

    return place


def _latest(starts: list[tuple[int, str]], event: int) -> str:
    at = bisect_right(starts, event, key=lambda start: start[0]) - 1
    return starts[at][1] if at >= 0 else ""


def _cells(group: Group, members: list[Allocation], length: int, place: Place) -> tuple[str, ...]:
    shape = "" if group.shape is None else str(list(group.shape))
    return (
        size(group.each_bytes),
        f"× {group.count:,}" if group.count > 1 else "",
        size(group.total_bytes) if group.count > 1 else "",
        markup.swatch(str(group.category)) + (text(f"{group.dtype} {shape}".strip()) or group.category.label),
        markup.name(group.operator.removeprefix("aten::")),
        markup.name(group.module),
        f'<span class="line">{text(group.line)}</span>',
        _life(members, length) + _details(members, place),
    )


def _life(members: list[Allocation], length: int) -> str:
    """A bar as wide as the run, filled where the tensors live; the first few stand for all."""
    bars = (
        f'<rect class="c-{a.category}" x="{_scaled(a.born, length)}" y="0" height="1" '
        f'width="{max(8, _scaled(_end(a, length), length) - _scaled(a.born, length))}"/>'
        for a in members[:MEMBERS]
    )
    return f'<svg class="life" viewBox="0 0 {_BAR_UNITS} 1" preserveAspectRatio="none" aria-hidden="true">{"".join(bars)}</svg>'


def _scaled(event: int, length: int) -> int:
    return event * _BAR_UNITS // max(length, 1)


def _end(a: Allocation, length: int) -> int:
    return length if a.died is None else a.died


def _details(members: list[Allocation], place: Place) -> str:
    lines = [_lifetime(a, place) for a in members[:MEMBERS]]
    if len(members) > MEMBERS:
        lines.append(f"and {len(members) - MEMBERS:,} more")
    stack = members[0].stack[:FRAMES]
    frames = "".join(f"<li>{text(frame)}</li>" for frame in stack)
    called = f'<p>called from, innermost first</p><ol class="stack">{frames}</ol>' if stack else ""
    items = "".join(f"<li>{line}</li>" for line in lines)
    return f'<details><summary>{_summary(members[0], place)}</summary><ul class="lives">{items}</ul>{called}</details>'


def _summary(a: Allocation, place: Place) -> str:
    return f"{text(place(a.born)) or 'before any step'} → {_death(a, place)}"


def _death(a: Allocation, place: Place) -> str:
    return "the end" if a.died is None else text(place(a.died)) or "before any step"


def _lifetime(a: Allocation, place: Place) -> str:
    until = "the end" if a.died is None else f"event {a.died:,}"
    module = f"{text(a.module)} · " if a.module else ""
    asked = f", {size(a.requested_bytes)} asked for" if a.requested_bytes != a.block_bytes else ""
    return f"{module}event {a.born:,} to {until} · {size(a.block_bytes)}{asked}"
