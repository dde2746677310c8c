"""Small tables that projects publish beside their settings: training runs of language models, and detection models.

Training runs are those of `benchmarks/truth/published-training.jsonl`, in the words of `tonnage plan train`. Rows of peft and of
Megatron's continuous integration are sources of their own.
"""

import csv
import json
import re
import sys
import time
from collections import Counter
from pathlib import Path

from rows import Prediction, Reading, Row, Source

LEAGUE = Path(__file__).parents[1]
sys.path.insert(1, str(LEAGUE.parent))

from published_training import TRUTH, NotSaid, predicted_bytes, rows_of, run_of  # noqa: E402

OTHER_SOURCES = ("peft", "megatron_golden", "megatron_golden_small")
UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def read() -> Reading:
    rows, left_out = [], Counter[str]()
    for case in rows_of(TRUTH / "published-training.jsonl"):
        if case["family"] in OTHER_SOURCES:
            left_out[f"{case['family']}: a source of its own"] += 1
            continue
        try:
            run = run_of(case)
        except NotSaid as reason:
            left_out[f"{case['family']}: {reason}"] += 1
            continue
        card = re.sub(r"^\d+x", "", run.words[run.words.index("--gpus") + 1]).replace("p5.48xlarge", "h100")
        measured = int(case["peak_mem_gib"] * 2**30)
        rows.append(Row(case["id"], card, "", {"line": json.dumps(case)}, run.figure, measured, _resolution(case)))
    with (LEAGUE / "figures" / "detectron2.csv").open(newline="") as file:
        zoo = list(csv.DictReader(file))
    left_out["detectron2: no package of it, and torchvision's detectors are other models"] += len(zoo)
    return Reading(rows, left_out)


def _resolution(case: dict) -> int:
    """Half of the last digit that was printed, where a number with its unit was."""
    printed = re.match(r"~?(\d+)(?:\.(\d+))? ?([KMG]i?B)\b", str(case.get("peak_mem_raw", "")))
    return int(UNITS[printed[3]] / 10 ** len(printed[2] or "") / 2) if printed else 0


def predict(row: Row) -> Prediction:
    began = time.perf_counter()
    run = run_of(json.loads(row.case["line"]))
    found = int(predicted_bytes(run, run.plan()))
    return Prediction(found, seconds=time.perf_counter() - began)


SOURCE = Source(
    "tables",
    "Tables of nanotron, torchtitan, torchtune, LitGPT, DeepSpeed and others",
    "benchmarks/truth/published-training.jsonl names repository, path and commit of each row; "
    "facebookresearch/detectron2 MODEL_ZOO.md at 02b5c4e2",
    read,
    predict,
)
