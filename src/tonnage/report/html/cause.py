"""Why a run ran out of memory, as a section: the cause, and the evidence with its lines."""

from collections.abc import Iterator

from tonnage.explain import Diagnosis, Finding
from tonnage.report.html import markup
from tonnage.report.html.markup import size, text

_NAMES = {
    "none": "nothing is wrong",
    "pinned-host": "pinned host memory",
    "host-memory": "memory of the host",
    "unbounded-cache": "a cache without a bound",
}


def cause_section(diagnosis: Diagnosis) -> str:
    """The cause in a sentence; below it, what was found."""
    name = _NAMES.get(diagnosis.cause, diagnosis.cause.replace("-", " "))
    kind = "ok" if diagnosis.cause == "none" else "oom"
    said = f'<p><strong class="cause {kind}">{text(name)}</strong> {text(diagnosis.sentence, 2000)}</p>'
    findings = "".join(_finding(finding, diagnosis.sentence) for finding in diagnosis.evidence)
    evidence = f'<dl class="evidence">{findings}</dl>' if findings else ""
    return markup.section("Why", said, evidence, name="cause")


def _finding(finding: Finding, said: str) -> str:
    """The cause's own sentence stands above already: its rule is name enough."""
    words = finding.rule if finding.sentence in said else finding.sentence
    lines = "".join(_lines(finding))
    where = f'<table class="guilty"><tbody>{lines}</tbody></table>' if lines else ""
    return f"<dt>{size(finding.size_bytes)}</dt><dd>{text(words, 2000)}{where}</dd>"


def _lines(finding: Finding) -> Iterator[str]:
    for guilty in finding.lines:
        count = f"{guilty.count:,} × " if guilty.count > 1 else ""
        yield (
            f'<tr><td class="n">{size(guilty.size_bytes)}</td><td class="line">{text(guilty.line) or "no line known"}</td>'
            f"<td>{count}{text(guilty.what)}</td></tr>"
        )
