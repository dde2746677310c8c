"""A recording as one HTML page that works offline: template, style, script and data in one file.

Charts are drawn by our own script of a few hundred lines: a plotting library adds megabytes to every page, draws each
event as a shape, and does not follow light or dark mode. The page allows only that script and style (by hash), so
nothing in a recording can run or fetch anything.
"""

from string import Template

from tonnage.explain import Advice, Diagnosis, Outlook
from tonnage.explain.cards import AllCards
from tonnage.explain.outlook import outlook_of
from tonnage.recording import Recording
from tonnage.recording.beyond import moment_of_failure, until_failure
from tonnage.report.html import sections
from tonnage.report.html.host import host_section
from tonnage.report.html.markup import embedded, policy, read_part, text
from tonnage.report.html.sections import cause_section
from tonnage.report.html.segments import segments_section
from tonnage.report.html.series import STRETCHES, packed_blocks, series_of
from tonnage.report.html.step import step_section

_SCRIPTS = ("common.js", "drawing.js", "timeline.js", "blocks.js", "controls.js", "moment.js", "icicle.js", "step.js")


def page_style() -> str:
    """Return the style of a page; a cluster's page has more."""
    return read_part("page.css") + read_part("step.css")


def page_script() -> str:
    """Return the script of a page."""
    return "".join(map(read_part, _SCRIPTS))


def render_page(
    recording: Recording,
    advice: Advice | None = None,
    *,
    diagnosis: Diagnosis | None = None,
    stretches: int = STRETCHES,
    cards: AllCards | None = None,
) -> str:
    """Return the page; for a long run the chart keeps the extremes of this many stretches."""
    style, script = page_style(), page_script()
    shown = until_failure(recording)
    named = advice or Advice()
    ahead = named.outlook
    # A diagnosis has its own section for its sentence and the outlook, except that memory climbs.
    if diagnosis:
        named = Advice(diagnosis.fixes, diagnosis.larger_card, total=diagnosis.total)
        ahead = Outlook(climb=outlook_of(recording).climb)
    return Template(read_part("page.html")).substitute(
        policy=policy([style], [script]),
        title=text(sections.title_of(recording)),
        style=style,
        header=sections.header_section(recording, ahead),
        cause=cause_section(diagnosis) if diagnosis else "",
        advice=sections.advice_section(recording, named) + (sections.all_cards_section(cards) if cards else ""),
        step_time=step_section(recording.step_time),
        ledger=sections.ledger_section(recording),
        outside=sections.outside_section(recording),
        segments=segments_section(shown),
        course=sections.course_section(shown),
        host=host_section(recording),
        settings=sections.settings_section(recording),
        basis=sections.basis_section(recording),
        data=embedded({"timeline": series_of(shown, stretches), "failure": _failure(recording)}),
        blocks=packed_blocks(shown),
        script=script,
    )


def _failure(recording: Recording) -> dict[str, int] | None:
    """Return the request that failed, if it is in the chart."""
    moment, oom = moment_of_failure(recording), recording.oom
    if moment is None or oom is None:
        return None
    sizes = {"asked": oom.requested_bytes, "free": oom.free_bytes, "reserved": oom.reserved_bytes}
    return {"event": moment, **sizes}
