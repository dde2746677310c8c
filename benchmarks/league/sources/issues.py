"""Issues that carry a program and what it printed. Where no card is named, the figure is one that no card changes.

pytorch#138685 names none either: its figures have the 32 MiB of cuBLAS on an H100 in them.
"""

import csv
from collections import Counter
from pathlib import Path

from rows import Prediction, Reading, Row, Source
from told import told

FIGURES = Path(__file__).parents[1] / "figures" / "issues.csv"
UNITS = {"GB": 10**9, "GiB": 2**30, "MiB": 2**20, "MB": 10**6}


def read() -> Reading:
    rows: list[Row] = []
    left_out: Counter[str] = Counter()
    with FIGURES.open(newline="") as file:
        lines = list(csv.DictReader(file))
    for line in lines:
        if line["left_out"]:
            left_out[line["left_out"]] += 1
            continue
        unit, digits = UNITS[line["unit"]], len(line["printed"].partition(".")[2])
        name = " ".join(filter(None, [line["issue"], line["program"], line["words"]]))
        case = {"program": line["program"], "words": line["words"].split()}
        measured, half = round(float(line["printed"]) * unit), round(unit * 10**-digits / 2)
        rows.append(Row(name, line["card"], line["torch"], case, "allocated", measured, resolution=half))
    return Reading(rows, left_out)


def predict(row: Row) -> Prediction:
    return told(row, "issues.py", [row.case["program"], *row.case["words"]])


SOURCE = Source(
    key="issues",
    title="Issues with a program and its peak",
    where="GitHub issues of pytorch/pytorch, intel/torch-xpu-ops, huggingface/accelerate, databricks/flashoptim, "
    "facebookresearch/maskrcnn-benchmark, by number in figures/issues.csv",
    read=read,
    predict=predict,
)
