"""The time of a step: a sentence, its breakdown, and every launch by stream, packed for the page's script.

What is too much for a page is left out, shortest first, and counted.
"""

from collections.abc import Sequence
from heapq import nlargest
from typing import get_args

from tonnage.clock.launch import Kind
from tonnage.clock.step import WAITING, SteadyStep
from tonnage.clock.streams import LANES
from tonnage.clock.timeline import Span
from tonnage.report.html import markup
from tonnage.report.html.markup import clean, packed_json, read_parts, text
from tonnage.report.html.series import FirstSeen
from tonnage.report.step_time import step_words, time_words
from tonnage.units import percent

MOST_SPANS = 100_000
MOST_STREAMS = 12
_TICKS_PER_S = 10_000_000  # the page counts in tenths of a microsecond


def step_section(time: SteadyStep | None) -> str:
    """Return the section; "" if no step was captured."""
    if time is None:
        return ""
    kinds = {kind: seconds for kind, seconds in time.time_by_kind.items() if seconds > 0}
    whole_s = sum(kinds.values())
    parts = [(_colour(kind), round(seconds / whole_s * 1e6)) for kind, seconds in kinds.items()]
    entries = []
    for kind, seconds in kinds.items():
        words = percent(seconds / whole_s) if seconds / whole_s >= 0.0005 else "&lt; 0.1 %"
        swatch, took = markup.swatch(_colour(kind)), f'<span class="faint">{time_words(seconds)}</span>'
        entries.append(f"<li>{swatch}{text(kind)}<b>{words}</b> {took}</li>")
    spans = packed_json(spans_of(time.timeline.spans, time.step_s))
    chart = f'{read_parts("step.html")}<script type="text/plain" id="spans">{spans}</script>'
    return markup.section(
        "The time of a step",
        f'<p id="step-words">{text(sentence(time))}</p>',
        '<p class="note">Predicted, in the steady state; nine in ten such steps are in the range.</p>',
        f'<div class="card">{markup.bar(parts, 1_000_000)}</div>',
        f'<ul id="step-kinds" class="legend">{"".join(entries)}</ul>',
        chart if time.timeline.spans else "",
        name="step-time",
    )


def sentence(time: SteadyStep, where: str = "") -> str:
    """Describe the step in one sentence."""
    words = ", ".join(step_words(time, where))
    return words[:1].upper() + words[1:]


def _colour(kind: str) -> str:
    """Return the colour's name; unknown kinds of later versions use that of "other"."""
    if kind == WAITING:
        return "waiting"
    return kind if kind in get_args(Kind) else "other"


def spans_of(spans: Sequence[Span], step_s: float, most: int = MOST_SPANS) -> dict[str, object]:
    """Return for each stream the gap before each launch, its length and its label: a name, a kind and its colour."""
    kept = nlargest(most, spans, key=lambda span: span.end_s - span.start_s) if len(spans) > most else spans
    by_stream: dict[int, list[Span]] = {}
    for span in sorted(kept, key=lambda span: span.start_s):
        by_stream.setdefault(span.stream, []).append(span)
    shown = sorted(nlargest(MOST_STREAMS, by_stream, key=lambda stream: len(by_stream[stream])))
    labels, streams = FirstSeen(), []
    for stream in shown:
        # Gaps and lengths come from rounded ends, so that rounding errors do not accumulate.
        gaps, lengths, end = [], [], 0
        for span in by_stream[stream]:
            start = max(round(span.start_s * _TICKS_PER_S), end)
            gaps.append(start - end)
            end = max(round(span.end_s * _TICKS_PER_S), start)
            lengths.append(end - start)
        name = f"stream {stream}" if stream < LANES else f"group {stream - LANES}"
        label = [labels[span.name, span.kind] for span in by_stream[stream]]
        streams.append({"stream": stream, "name": name, "gaps": gaps, "lengths": lengths, "label": label})
    return {
        "length": round(step_s * _TICKS_PER_S),
        "labels": [(clean(name), clean(kind), _colour(kind)) for name, kind in labels],
        "streams": streams,
        "left_out": len(spans) - sum(len(by_stream[stream]) for stream in shown),
    }
