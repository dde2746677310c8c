"""Public memory snapshots whose scripts are there too: peaks of the recorded part; and what their authors measured beside them.

Where a script is not public, its operations were read off the snapshot's own stacks. A card that nobody names follows from the
workspace that cuBLAS took: 32 MiB on an H100, 8.125 MiB on what came before it.
"""

import csv
from collections import Counter
from pathlib import Path

from rows import Prediction, Reading, Row, Source
from told import told

FIGURES = Path(__file__).parents[1] / "figures"
SIZES = {"a": ("2560", "32", "32", "10240"), "b": ("1024", "24", "16", "4096")}  # width, layers, heads, inner
MIB = 2**20


def read() -> Reading:
    rows: list[Row] = []
    left_out: Counter[str] = Counter()
    for line in _lines("snapshots.csv"):
        if line["left_out"]:
            left_out[line["left_out"]] += 1
            continue
        name = f"{line['repository'].partition('/')[0]}/{Path(line['path']).stem}"
        case = {key: line[key] for key in ("author", "mode", "mixed", "after", "context")}
        measured = {"allocated": int(line["peak_allocated"]), "reserved": int(line["peak_reserved"])}
        if line["older_cache"]:  # what an earlier part of the process had reserved is more than this part needs
            left_out["reserved by an earlier part"] += 1
            del measured["reserved"]
        for meter, size in measured.items():
            rows.append(Row(f"{name} {meter}", line["card"], line["torch"], case, meter, size))  # type: ignore[arg-type]
    for line in _lines("course_attention.csv"):
        if line["suite"] == "torch_compile":
            left_out["torch.compile"] += 1
            continue
        case = {"length": line["seq_len"], "width": line["d_model"], "batch": line["batch_size"]}
        name = f"attention {line['seq_len']} x {line['d_model']}"
        measured_bytes, half = round(float(line["activation_mib"]) * MIB), round(0.0005 * MIB)
        rows.append(Row(name, "h100", "2.11", case, "allocated", measured_bytes, resolution=half))
    return Reading(rows, left_out)


def predict(row: Row) -> Prediction:
    case = row.case
    if "author" not in case:
        return told(row, "attention.py", [word for key in case for word in (f"--{key}", str(case[key]))])
    width, layers, heads, inner = SIZES[case["author"]]
    words = ["--author", case["author"], "--mode", case["mode"], "--after", case["after"], "--context", case["context"]]
    words += ["--width", width, "--layers", layers, "--heads", heads, "--inner", inner]
    return told(row, "lm.py", [*words, *(["--mixed"] if case["mixed"] == "1" else [])])


def _lines(name: str) -> list[dict[str, str]]:
    with (FIGURES / name).open(newline="") as file:
        return list(csv.DictReader(file))


SOURCE = Source(
    key="snapshots",
    title="Public memory snapshots",
    where="kkaitlyn111/cs336-a2-systems c1272e18 (memory_files), Wedsonlin/assignment2-systems 87b08641 (results), "
    "cranberrii/ftcourse a8cedf28, facebookresearch/mosaic 67b27bb1",
    read=read,
    predict=predict,
)
