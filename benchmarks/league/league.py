"""The league: every predictor's error on runs that others measured and published.

    python benchmarks/league/league.py [SOURCE ...] [--sample N] [--resume] [--check]

Each source is read, its rows are predicted, and both are kept in `benchmarks/results/league/SOURCE.json` as they come: a run
that was stopped goes on with --resume. The table is made from those files alone: `page.py` writes it into docs/accuracy.md.
"""

import argparse
import importlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(HERE)]
RESULTS = ROOT / "benchmarks" / "results" / "league"
SOURCES = (
    "xmem", "timm", "liger", "liger_kernels", "peft", "megatron", "gpumemnet", "fakegpu", "tables", "snapshots", "issues", "h200",
)  # fmt: skip
# Sources whose kernels are libraries' own run under a CUDA build of torch, where those are.
CUDA_BUILD = ("liger_kernels",)
SAVE_EVERY_S = 10.0
# What depends on addresses of the host (when autocast's cache is dropped) is less.
SAME = 1e-3


def judged(name: str, count: int | None, resume: bool) -> dict[str, Any]:
    """Every row of a source with what each predictor says of it; kept where all rows are asked for."""
    from rows import sample

    source = importlib.import_module(f"sources.{name}").SOURCE
    reading = source.read()
    rows = sample(reading.rows, count) if count else list(reading.rows)
    known = {row["name"]: row for row in kept(name)} if resume else {}
    found: list[dict[str, Any]] = []
    result = {
        "title": source.title, "where": source.where, "read": len(reading.rows) + reading.left_out.total(),
        "left_out": dict(reading.left_out), "rows": found,
    }  # fmt: skip
    began = saved = time.perf_counter()
    for number, row in enumerate(rows, 1):
        found.append(known.pop(row.name, None) or predicted(source, row))
        now = time.perf_counter()
        print(f"\r{name}: {number} of {len(rows)}, {now - began:.0f} s", end="", file=sys.stderr, flush=True)
        if count is None and (number == len(rows) or now - saved > SAVE_EVERY_S):
            # What an earlier run knew of rows still to come is kept until they come.
            save(name, result | {"rows": [*found, *known.values()]} if number < len(rows) else result)
            saved = now
    print(file=sys.stderr)
    return result


def kept(name: str) -> list[dict[str, Any]]:
    """The rows of a source that were predicted before."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []


def save(name: str, result: dict[str, Any]) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    partial = RESULTS / f"{name}.json.part"
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(RESULTS / f"{name}.json")


def changed(name: str, count: int) -> list[str]:
    """What Tonnage says now of a sample of a source's rows, where it is not what was kept."""
    from rows import sample

    source, before = importlib.import_module(f"sources.{name}").SOURCE, {row["name"]: row for row in kept(name)}
    rows = sample([row for row in source.read().rows if row.name in before and not source.slow(row)], count)
    words = []
    for row in rows:
        said, old = source.predict(row), before[row.name]
        was, verdict = old["says"].get("tonnage"), old["says_fits"].get("tonnage")
        equal = said.predicted == was or (said.predicted and was and abs(said.predicted / was - 1) < SAME)
        if not equal or said.fits != verdict:
            now = said.refused or f"{said.predicted} bytes, fits: {said.fits}"
            words.append(f"{name}: {row.name}: {now}; kept: {was} bytes, fits: {verdict}")
    return words


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
            kept["refused"][name] = re.sub(r" ?\(/\S+\)", "", prediction.refused)  # no places of this machine
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sources", nargs="*", metavar="SOURCE", help=", ".join(SOURCES))
    parser.add_argument(
        "--sample", type=int, metavar="N", help="N rows of each, the same in every run; nothing is kept"
    )
    parser.add_argument("--resume", action="store_true", help="predict only rows that are not kept yet")
    parser.add_argument(
        "--check", action="store_true", help="fail where Tonnage says another thing of a sample than was kept"
    )
    options = parser.parse_args()
    there = [name for name in SOURCES if (HERE / "sources" / f"{name}.py").exists()]
    words: list[str] = []
    for name in options.sources or there:
        if name in CUDA_BUILD and not _cuda_build():
            words += _elsewhere(name)
        elif options.check:
            words += changed(name, options.sample or 2)
        else:
            report(name, judged(name, options.sample, options.resume))
    sys.exit("\n".join(words) or 0)


def _cuda_build() -> bool:
    from tonnage.virtual.driver.loading import is_cuda_build, torch_root

    return is_cuda_build(torch_root())


def _elsewhere(name: str) -> list[str]:
    """The same command for one source, in the environment that has the CUDA build."""
    python = ROOT / ".venv-cuda" / "bin" / "python"
    if not python.exists():
        return [f"{name} needs a CUDA build of torch: make setup-cuda"]
    flags = [word for word in sys.argv[1:] if word not in SOURCES]
    return [] if subprocess.run([python, __file__, *flags, name]).returncode == 0 else [f"{name} failed"]


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
