"""A cluster's recording as one HTML page that works offline: ranks side by side, and the full report of each kind.

A kind's report is its own page, compressed; the script unpacks it into a frame on demand. Recordings are read one after
another, which bounds both the page's size and the memory to make it.
"""

import gzip
from base64 import b64encode
from collections.abc import Iterator
from string import Template

from tonnage.explain import Advice, advice_for
from tonnage.recording import ClusterRecording
from tonnage.report.html import cluster_sections as sections
from tonnage.report.html.host import cluster_host_section
from tonnage.report.html.markup import embedded, policy, read_part, text
from tonnage.report.html.page import page_script, page_style, render_page
from tonnage.report.html.sections import advice_section
from tonnage.report.html.series import STRETCHES, line_of
from tonnage.report.html.step import sentence
from tonnage.report.runs.odd_ranks import Comparison, Kind, compare_ranks
from tonnage.report.step_time import rank_words

MOST_KINDS = 100
_SCRIPTS = ("common.js", "drawing.js", "lines.js", "cluster.js")
_SAMPLES = 6_000
_FEWEST_SAMPLES, _FEWEST_STRETCHES = 200, 400


def render_cluster_page(cluster: ClusterRecording, advice: Advice | None = None) -> str:
    """Return the page; `advice` is for the rank that needs most."""
    summary, found = cluster.summary, compare_ranks(cluster.summary)
    shown = found.kinds[:MOST_KINDS]
    worst = cluster.recording_of(summary.worst) if summary.worst is not None else None
    lines: list[dict[str, object]] = []
    reports = "\n".join(_reports(cluster, shown, found, lines))
    style, script = page_style() + read_part("lines.css") + read_part("cluster.css"), "".join(map(read_part, _SCRIPTS))
    # The step time of the rank that all others wait for.
    time = cluster.recording_of(summary.slowest.rank).step_time if summary.slowest else None
    step_words = sentence(time, rank_words(summary)) if time else ""
    ceiling = max(summary.capacity_bytes - worst.header.overhead_bytes, 0) if worst else 0
    return Template(read_part("cluster.html")).substitute(
        policy=policy([style, page_style()], [script, page_script()]),
        title=text(sections.title_of(summary)),
        style=style,
        tabs=sections.tabs(shown, found),
        header=sections.header_section(summary, found, worst, step_words, climbs=bool(advice and advice.outlook.climb)),
        ranks=sections.ranks_section(summary, shown, found),
        hidden="" if shown else " hidden",
        engines=sections.engines_section(shown),
        categories=sections.categories_section(shown, found),
        host=cluster_host_section(summary),
        advice=advice_section(worst, advice, of=f"rank {summary.worst}") if worst and advice else "",
        reports=reports,
        data=embedded({"lines": lines, "ceiling": ceiling}),
        script=script,
    )


def _reports(
    cluster: ClusterRecording, shown: tuple[Kind, ...], found: Comparison, lines: list[dict[str, object]]
) -> Iterator[str]:
    """Yield each kind's packed report, and append its timeline to `lines`."""
    count = max(1, len(shown))
    samples, stretches = max(_FEWEST_SAMPLES, _SAMPLES // count), max(_FEWEST_STRETCHES, STRETCHES // count)
    for kind in shown:
        recording = cluster.recording_of(kind.first.rank)
        lines.append(sections.line_head(kind, cluster.summary, found) | line_of(recording, samples))
        packed = gzip.compress(render_page(recording, advice_for(recording), stretches=stretches).encode(), mtime=0)
        yield f'<script type="text/plain" id="report-{kind.first.rank}">{b64encode(packed).decode()}</script>'
