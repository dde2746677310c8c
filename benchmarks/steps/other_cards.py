"""Hold predicted steps against published ones of other cards: `python benchmarks/steps/other_cards.py FOLDER [MODEL …]`.

The rows are timm's own (`benchmarks/truth/timm-speeds.jsonl`). Each kind of step runs once on a virtual B300, which holds all of
them, and is timed for the cards that have a row; recordings stay in FOLDER and are not made again. Nothing is fitted to them.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from tonnage.clock.step import step_time
from tonnage.hardware import find_gpu
from tonnage.recording import read_recording

HERE = Path(__file__).parent
ROWS = HERE.parent / "truth" / "timm-speeds.jsonl"


def captured(row: dict[str, Any], folder: Path) -> Path:
    """The recording of a row's step."""
    flags = ["--train"] * (row["mode"] == "train") + ["--channels-last"] * row["channels_last"]
    path = folder / f"{row['model']}-{row['batch']}{''.join(flags)}.tonnage"
    if not path.exists():
        script = [HERE / "timm_step.py", row["model"], "--batch", str(row["batch"]), *flags]
        command = [sys.executable, "-m", "tonnage", "run", "--gpu", "b300", "-o", path, *script]
        # Fused attention came with torch 2.0, after the trainings were timed.
        environment = os.environ | ({"TIMM_FUSED_ATTN": "0"} if "pt112" in row["source"] else {})
        subprocess.run(command, check=True, capture_output=True, env=environment)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--out", type=Path, help="where to keep the rows as JSON")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in map(json.loads, ROWS.read_text("utf-8").splitlines()):
        if arguments.models and row["model"] not in arguments.models:
            continue
        step = read_recording(captured(row, arguments.folder)).captured
        if step is None:
            print(f"{row['model']} was not captured")
            continue
        time = step_time(step, find_gpu(row["gpu"]))
        ratio, covered = time.step_s / row["step_s"], time.low_s <= row["step_s"] <= time.high_s
        found[row["gpu"], row["mode"]].append(row | {"predicted_s": time.step_s, "ratio": ratio, "covered": covered})
        layout = "nhwc" if row["channels_last"] else "nchw"
        print(
            f"{row['gpu']:20}{row['mode']:6}{layout} {row['model']:30}{1e3 * row['step_s']:8.1f} ms {ratio:6.2f}",
            flush=True,
        )
    for (gpu, mode), rows in found.items():
        near = sum(abs(row["ratio"] - 1) <= 0.2 for row in rows)
        covered = sum(row["covered"] for row in rows)
        words = f"{median(row['ratio'] for row in rows):.2f} in the median, {near} within 20 %, {covered} in the range"
        print(f"{gpu:20}{mode:6}{len(rows)} steps, predicted over published {words}")
    if arguments.out:
        arguments.out.write_text(json.dumps([row for rows in found.values() for row in rows], indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
