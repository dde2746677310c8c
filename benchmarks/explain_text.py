"""Hold `tonnage explain` of texts against public reports whose cause is known: how often it comes first, and how surely.

The reports (benchmarks/reports) are kept as facts: the source, the numbers, the functions of the traceback, the cause and how
it was established. The text is made again from them by the wordings of the programs that print it. "known" reports were at
hand while the rules were written; "judged" ones were gathered afterwards, and nothing was changed for them.
"""

import argparse
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tonnage.explain.text import TextDiagnosis, explain_text

REPORTS = Path(__file__).parent / "reports"
SETS = ("known", "judged")
# A cause that holds another: to say the wider one is not wrong, only less.
WIDER = {
    "weights": {"capacity"},
    "optimizer": {"capacity"},
    "attention": {"capacity", "one-tensor"},
    "logits": {"capacity", "one-tensor"},
    "decoding": {"capacity", "one-tensor"},
    "length": {"capacity", "one-tensor"},
    "evaluation": {"capacity", "one-tensor"},
    "one-tensor": {"capacity"},
    "capacity": {"one-tensor"},
}


@dataclass(frozen=True)
class Judged:
    """A report and what was said of it."""

    report: dict[str, Any]
    found: TextDiagnosis

    @property
    def is_first(self) -> bool:
        return self.found.first.cause == self.report["cause"]

    @property
    def is_wider(self) -> bool:
        return self.is_first or self.found.first.cause in WIDER.get(self.report["cause"], set())

    @property
    def is_wrongly_certain(self) -> bool:
        said = {suspect.cause for suspect in self.found.causes if suspect.certainty == "certain"}
        return bool(said - {self.report["cause"]} - WIDER.get(self.report["cause"], set()))


def reports(name: str) -> list[dict[str, Any]]:
    """Of one set."""
    return [json.loads(line) for line in (REPORTS / f"{name}.jsonl").read_text("utf-8").splitlines()]


def text_of(report: dict[str, Any]) -> str:
    """The text of a report: what came before, the traceback by its functions, the message with its numbers."""
    numbers = report.get("numbers", {})
    parts = {
        "allowed_part": f"{numbers['allowed']} allowed; " if "allowed" in numbers else "",
        "process_part": f"Including non-PyTorch memory, this process has {numbers.get('process')} memory in use. "
        if "process" in numbers
        else "",
        "others_part": "".join(f"Process 100 has {size} memory in use. " for size in numbers.get("others", [])),
        "private_part": f"with {numbers['private']} allocated in private pools (e.g., CUDA Graphs), "
        if "private" in numbers
        else "",
    }
    wordings = tomllib.loads((REPORTS / "wordings.toml").read_text("utf-8"))
    lines = list(report.get("before", []))
    if report.get("frames"):
        lines.append("Traceback (most recent call last):")
        for frame in report["frames"]:
            place, _, code = frame.partition("|")
            file, _, function = place.rpartition(":")
            folder = "/site-packages/" if file.startswith(("torch/", "transformers/", "vllm/", "sglang/")) else ""
            lines.append(f'  File "{folder}{file}", line 1, in {function}')
            lines += [f"    {code}"] if code else []
    lines.append(wordings[report["wording"]].format_map(numbers | parts))
    return "\n".join([*lines, *report.get("after", [])])


def judged(name: str) -> list[Judged]:
    """Every report of a set, explained."""
    return [Judged(report, explain_text(text_of(report).splitlines())) for report in reports(name)]


def main() -> None:
    """Print the count of each set, and with --verbose each report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verbose", "-v", action="store_true", help="every report")
    parser.add_argument("--set", choices=SETS, action="append", help="one set alone")
    options = parser.parse_args()
    total = first = wider = wrong = 0
    for name in options.set or SETS:
        rows = judged(name)
        for row in rows if options.verbose else ():
            mark = "✓" if row.is_first else "~" if row.is_wider else "✗"
            mark += "!" if row.is_wrongly_certain else " "
            said = ", ".join(f"{suspect.cause} ({suspect.certainty})" for suspect in row.found.causes[:3])
            print(f"{mark} {row.report['source'][:52]:52} {row.report['cause']:14} {said}")
        counts = [sum(getattr(row, key) for row in rows) for key in ("is_first", "is_wider", "is_wrongly_certain")]
        print(
            f"{name:7} {len(rows):3} reports: cause first in {counts[0]}, it or a wider one in {counts[1]}, wrongly certain {counts[2]}"
        )
        total, first, wider, wrong = total + len(rows), first + counts[0], wider + counts[1], wrong + counts[2]
    print(
        f"{'both':7} {total:3} reports: cause first in {first}, it or a wider one in {wider}, wrongly certain {wrong}"
    )


if __name__ == "__main__":
    main()
