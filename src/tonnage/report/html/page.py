"""A recording as one page that opens offline: template, style, script and data in one file.

Charts are drawn by a script of ours of a few hundred lines: a plotting library weighs megabytes in every page, draws
each event as a shape, and does not follow the reader's light or dark. The page allows that one script and style (by
their hashes) and nothing else, so whatever a recording says cannot run or fetch anything.
"""

from string import Template

from tonnage.explain import Advice
from tonnage.recording import Recording
from tonnage.report.html import sections
from tonnage.report.html.markup import text
from tonnage.report.html.segments import segments_section
from tonnage.report.html.series import STRETCHES, series_of
from tonnage.report.html.shell import embedded, policy, read_part
from tonnage.report.html.tensors import tensors_section
from tonnage.report.html.trees import by_line, by_module, tree_of

_SCRIPTS = ("common.js", "drawing.js", "timeline.js", "controls.js", "icicle.js")


def page_style() -> str:
    """The style of a page; a cluster's page has more."""
    return read_part("page.css")


def page_script() -> str:
    """The script of a page."""
    return "".join(map(read_part, _SCRIPTS))


def render_page(recording: Recording, advice: Advice | None = None, *, stretches: int = STRETCHES) -> str:
    """The page; of a long run it keeps the highest and lowest moments of so many stretches."""
    style, script = page_style(), page_script()
    return Template(read_part("page.html")).substitute(
        policy=policy([style], [script]),
        title=text(sections.title_of(recording)),
        style=style,
        header=sections.header_section(recording),
        ledger=sections.ledger_section(recording),
        outside=sections.outside_section(recording),
        tensors=tensors_section(recording),
        segments=segments_section(recording),
        course=sections.course_section(recording),
        advice=sections.advice_section(recording, advice or Advice()),
        settings=sections.settings_section(recording),
        basis=sections.basis_section(recording),
        data=embedded(_figures(recording, stretches)),
        script=script,
    )


def _figures(recording: Recording, stretches: int) -> dict[str, object]:
    live = recording.live_at_peak
    return {
        "timeline": series_of(recording, stretches),
        "trees": {
            "module": tree_of(live, by_module, "all modules"),
            "line": tree_of(live, by_line, "all lines"),
        },
        "tree": "module" if any(a.module for a in live) else "line",
    }
