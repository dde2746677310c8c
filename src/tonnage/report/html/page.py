"""A recording as one page that opens offline: template, style, script and data in one file.

Charts are drawn by a script of ours of a few hundred lines: a plotting library weighs megabytes in every page, draws
each event as a shape, and does not follow the reader's light or dark. The page allows that one script and style (by
their hashes) and nothing else, so whatever a recording says cannot run or fetch anything.
"""

import json
from base64 import b64encode
from functools import cache
from hashlib import sha256
from pathlib import Path
from string import Template

from tonnage.explain import Advice
from tonnage.recording import Recording
from tonnage.report.html import sections
from tonnage.report.html.markup import text
from tonnage.report.html.segments import segments_section
from tonnage.report.html.series import series_of
from tonnage.report.html.tensors import tensors_section
from tonnage.report.html.trees import by_line, by_module, tree_of

_DATA = Path(__file__).parent / "data"
_SCRIPTS = ("common.js", "timeline.js", "controls.js", "icicle.js")


def render_page(recording: Recording, advice: Advice | None = None) -> str:
    """The page."""
    style, script = _read("page.css"), "".join(map(_read, _SCRIPTS))
    return Template(_read("page.html")).substitute(
        policy=_policy(style, script),
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
        data=_embedded(_figures(recording)),
        script=script,
    )


def _figures(recording: Recording) -> dict[str, object]:
    live = recording.live_at_peak
    return {
        "timeline": series_of(recording),
        "trees": {
            "module": tree_of(live, by_module, "all modules"),
            "line": tree_of(live, by_line, "all lines"),
        },
        "tree": "module" if any(a.module for a in live) else "line",
    }


def _embedded(figures: dict[str, object]) -> str:
    """JSON in which no markup can begin or end."""
    plain = json.dumps(figures, separators=(",", ":"))
    return plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _policy(style: str, script: str) -> str:
    return (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    )


def _hash(source: str) -> str:
    return f"'sha256-{b64encode(sha256(source.encode()).digest()).decode()}'"


@cache
def _read(name: str) -> str:
    return (_DATA / name).read_text(encoding="utf-8")
