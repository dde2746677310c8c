"""Hold predicted step times against measured ones: `python benchmarks/steps/judge.py FOLDER`.

FOLDER has a recording of each training, NAME.tonnage, as `tonnage run --gpu h200 -o FOLDER/NAME.tonnage benchmarks/steps/train.py
NAME` makes it. Trainings that are only judged by are reported apart from those that figures were fitted to, and their rows are
not shown unless `--judged` asks for them: who chooses a model's form should not have seen them.
"""

import argparse
import json
from pathlib import Path

from tonnage.recording import read_recording

MEASURED = Path(__file__).parents[1] / "results" / "steps-h200.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, help="where to keep the rows as JSON")
    parser.add_argument("--judged", action="store_true", help="show the rows that are only judged by, too")
    arguments = parser.parse_args()
    rows = {}
    for name, measured in json.loads(MEASURED.read_text("utf-8"))["trainings"].items():
        path = arguments.folder / f"{name}.tonnage"
        time = read_recording(path).step_time if path.exists() else None
        if time is None or "failed" in measured:
            if path.exists():
                print(f"{name:40} no step was captured")
            continue
        error = time.step_s / measured["step_s"] - 1
        covered = time.low_s <= measured["step_s"] <= time.high_s
        rows[name] = {"predicted_s": time.step_s, "measured_s": measured["step_s"], "error": error, "covered": covered,
                      "judged": measured["judged"]}  # fmt: skip
        figures = f"{1e3 * measured['step_s']:8.1f} ms {1e3 * time.step_s:8.1f} {error:+7.1%}"
        if arguments.judged or not measured["judged"]:
            print(f"{name:40} {figures}{'' if covered else '  not covered'}")
    for judged in (False, True):
        errors = sorted(abs(row["error"]) for row in rows.values() if row["judged"] == judged)
        covered = sum(row["covered"] for row in rows.values() if row["judged"] == judged)
        words = f"median {_quantile(errors, 0.5):.1%}, 95th percentile {_quantile(errors, 0.95):.1%}, in the range {covered}"
        print(f"{'judged' if judged else 'known'} {len(errors)}: {words}")
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


if __name__ == "__main__":
    main()
