"""The league: every predictor's error on runs that others measured and published.

    python benchmarks/league/league.py [SOURCE ...] [--sample N] [--resume]

Each source is read, its rows are predicted, and both are kept in `benchmarks/results/league/SOURCE.json`. The table is made from
those files alone: `page.py` writes it into docs/accuracy.md.
"""

import argparse
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(HERE)]
RESULTS = ROOT / "benchmarks" / "results" / "league"
SOURCES = ("xmem", "timm", "liger", "peft", "megatron", "gpumemnet", "fakegpu", "tables", "snapshots", "issues")


def judged(name: str, count: int | None, resume: bool) -> dict[str, Any]:
    """Every row of a source with what each predictor says of it."""
    from rows import sample

    source = importlib.import_module(f"sources.{name}").SOURCE
    reading = source.read()
    rows = sample(reading.rows, count) if count else list(reading.rows)
    kept = RESULTS / f"{name}.json"
    known = {row["name"]: row for row in json.loads(kept.read_text())["rows"]} if resume and kept.exists() else {}
    found, began = [], time.perf_counter()
    for number, row in enumerate(rows, 1):
        if row.name not in known:
            known[row.name] = predicted(source, row)
        found.append(known[row.name])
        passed = time.perf_counter() - began
        print(f"\r{name}: {number} of {len(rows)}, {passed:.0f} s", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return {
        "title": source.title, "where": source.where, "read": len(reading.rows) + reading.left_out.total(),
        "left_out": dict(reading.left_out), "rows": found,
    }  # fmt: skip


def predicted(source: Any, row: Any) -> dict[str, Any]:
    """A row as it is kept: what was measured, and what Tonnage and the others say of it."""
    said = {"tonnage": source.predict(row)} | {name: ask(row) for name, ask in source.rivals.items()}
    kept = {
        "name": row.name, "card": row.card, "torch": row.torch, "meter": row.meter, "measured": row.measured,
        "resolution": row.resolution, "fits": row.fits, "says": dict(row.rivals), "says_fits": {}, "refused": {},
    }  # fmt: skip
    for name, prediction in said.items():
        if prediction.predicted is not None:
            kept["says"][name] = prediction.predicted
        if prediction.fits is not None:
            kept["says_fits"][name] = prediction.fits
        if prediction.refused:
            kept["refused"][name] = prediction.refused
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sources", nargs="*", default=SOURCES, metavar="SOURCE", help=", ".join(SOURCES))
    parser.add_argument(
        "--sample", type=int, metavar="N", help="N rows of each, the same in every run; nothing is kept"
    )
    parser.add_argument("--resume", action="store_true", help="predict only rows that are not kept yet")
    options = parser.parse_args()
    for name in options.sources:
        result = judged(name, options.sample, options.resume)
        if options.sample is None:
            RESULTS.mkdir(parents=True, exist_ok=True)
            (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        report(name, result)


def report(name: str, result: dict[str, Any]) -> None:
    """One line a predictor: rows, median and 90th percentile of the error, verdicts."""
    from statistics import quantiles

    predictors = dict.fromkeys(key for row in result["rows"] for key in (*row["says"], *row["says_fits"]))
    for predictor in predictors:
        errors = sorted(
            abs(relative(row, predictor)) for row in result["rows"] if row["measured"] and predictor in row["says"]
        )
        verdicts = [
            row["says_fits"][predictor] == row["fits"]
            for row in result["rows"]
            if predictor in row["says_fits"] and row["fits"] is not None
        ]
        line = f"{name:<10} {predictor:<12} {len(errors):5} rows"
        if len(errors) > 1:
            tenths = quantiles(errors, n=10)
            line += f"  median {tenths[4]:6.2%}  90th percentile {tenths[8]:6.2%}"
        if verdicts:
            line += f"  verdicts {sum(verdicts)} of {len(verdicts)}"
        print(line)


def relative(row: dict[str, Any], predictor: str) -> float:
    """The relative error of a kept row, which is none within what the publisher rounded away."""
    off = row["says"][predictor] - row["measured"]
    return 0.0 if abs(off) <= row["resolution"] else off / row["measured"]


if __name__ == "__main__":
    main()
