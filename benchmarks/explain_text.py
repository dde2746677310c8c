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

from tonnage.errors import RequestError
from tonnage.explain.text import Suspect, explain_text

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
    """A report and the causes that were said of it; none where the text was not understood."""

    report: dict[str, Any]
    causes: tuple[Suspect, ...]

    @property
    def first(self) -> str:
        return self.causes[0].cause if self.causes else ""

    @property
    def is_first(self) -> bool:
        return self.first == self.report["cause"]

    @property
    def is_wider(self) -> bool:
        return self.is_first or self.first in WIDER.get(self.report["cause"], set())

    @property
    def is_wrongly_certain(self) -> bool:
        said = {suspect.cause for suspect in self.causes if suspect.certainty == "certain"}
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
    rows = []
    for report in reports(name):
        try:
            causes = explain_text(text_of(report).splitlines()).causes
        except RequestError:
            causes = ()
        rows.append(Judged(report, causes))
    return rows


def main() -> None:
    """Print the count of each set, and with --verbose each report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verbose", "-v", action="store_true", help="every report")
    parser.add_argument("--set", choices=SETS, action="append", help="one set alone")
    options = parser.parse_args()
    everything: list[Judged] = []
    for name in options.set or SETS:
        rows = judged(name)
        for row in rows if options.verbose else ():
            mark = "✓" if row.is_first else "~" if row.is_wider else "✗"
            said = ", ".join(f"{suspect.cause} ({suspect.certainty})" for suspect in row.causes[:3])
            wrong = "!" if row.is_wrongly_certain else " "
            print(f"{mark}{wrong} {row.report['source'][:52]:52} {row.report['cause']:14} {said}")
        print(_count(name, rows))
        everything += rows
    print(_count("both", everything))


def _count(name: str, rows: list[Judged]) -> str:
    first, wider, wrong = (
        sum(getattr(row, key) for row in rows) for key in ("is_first", "is_wider", "is_wrongly_certain")
    )
    return (
        f"{name:7} {len(rows):3} reports: cause first in {first}, it or a wider one in {wider}, wrongly certain {wrong}"
    )


if __name__ == "__main__":
    main()
