"""A difference between two runs as Markdown, for a comment on a pull request. It only formats.

Names come from untrusted scripts: they are shown as code, so that they cannot form Markdown, HTML or mentions.
"""

from collections.abc import Iterator, Sequence

from tonnage.explain.diff import Growth, GrowthLimit, RunDifference
from tonnage.recording import Recording
from tonnage.report.diff import growth_percent, labelled, signed
from tonnage.units import format_bytes
from tonnage.untrusted import printable

_LONGEST_NAME = 80


def markdown_difference(
    names: tuple[str, str],
    runs: tuple[Recording, Recording],
    difference: RunDifference,
    limit: GrowthLimit | None,
    failed: bool,
    *,
    rows: int,
) -> str:
    """Return the peaks as a table, and the rest collapsed."""
    names = (names[0].removesuffix(".tonnage"), names[1].removesuffix(".tonnage"))
    grew, after = difference.peaks[0], runs[1].header
    words = f"{signed(grew.grew_bytes)} ({growth_percent(grew)})" if grew.grew_bytes else "No change"
    judged = "" if limit is None else f", more than {limit.text}" if failed else f", within {limit.text}"
    lines = [f"### GPU memory of {code(after.program)} on {after.gpu_name}", ""]
    lines += [f"**{words}** at the peak of allocated memory{judged}.", ""]
    for name, run in zip(names, runs, strict=True):
        if run.header.outcome != "ok":
            died = f"runs out of memory at {code(run.oom.line)}" if run.oom else "fails for reasons of its own"
            lines += [f"{name} {died}: it is compared up to there.", ""]
    lines += _table("peak", names, difference.peaks, len(difference.peaks))
    lines += ["", "<details><summary>By category, module and line</summary>", ""]
    for title, growths in (
        ("category", labelled(difference.categories)),
        ("module", difference.modules),
        ("line", difference.lines),
    ):
        changed = [growth for growth in growths if growth.grew_bytes]
        if [growth.name for growth in changed] not in ([], [""]):
            lines += [*_table(title, names, changed, rows), ""]
    return "\n".join([*lines, "</details>", ""])


def code(name: str) -> str:
    """Format a name as inline code."""
    plain = printable(name).replace("`", "'").replace("|", "\\|") or "elsewhere"
    return f"`{plain if len(plain) <= _LONGEST_NAME else plain[:_LONGEST_NAME] + '…'}`"


def _table(title: str, names: tuple[str, str], growths: Sequence[Growth], rows: int) -> Iterator[str]:
    yield f"| {title} | {names[0]} | {names[1]} | change |"
    yield "|---|--:|--:|--:|"
    for growth in growths[:rows]:
        change = f"{signed(growth.grew_bytes)} ({growth_percent(growth)})" if growth.grew_bytes else "–"
        sizes = f"{format_bytes(growth.before_bytes)} | {format_bytes(growth.after_bytes)}"
        yield f"| {code(growth.name)} | {sizes} | {change} |"
    if rest := growths[rows:]:
        yield f"| and {len(rest)} more | | | {signed(sum(growth.grew_bytes for growth in rest))} |"
