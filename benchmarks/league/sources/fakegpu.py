"""FakeGPU's fine-tunings of Qwen3.5 and an inference, measured on two cards beside its own two predictions.

Where only the size of its error was published, its prediction is taken to be too large by that much.
"""

import csv
import sys
import tempfile
from collections import Counter
from pathlib import Path

import running
from rows import Prediction, Reading, Row, Source

HERE = Path(__file__).parent.parent
FIGURES = HERE / "figures" / "fakegpu.csv"
SCRIPT = HERE / "scripts" / "fakegpu_sft.py"
TRANSFORMERS = Path(sys.prefix) / "transformers-5.12"
GIB = 2**30
RESOLUTION = round(0.0005 * GIB)
# The RTX PRO 5000 is not in the catalogue; the larger card of its architecture stands in, since only the allocator was read.
CARDS = {"RTX PRO 5000": "rtx-pro-6000", "RTX 3090 Ti": "rtx-3090-ti"}


def read() -> Reading:
    rows, left_out = [], Counter[str]()
    for figures in csv.DictReader(FIGURES.open()):
        if figures["ranks"] != "1":
            left_out["ranks that share one card, with communication that was simulated"] += 1
        else:
            rows.append(row_of(figures))
    return Reading(rows, left_out)


def row_of(figures: dict[str, str]) -> Row:
    measured = float(figures["gib"])
    static = float(figures["static_gib"] or measured * (1 + float(figures["static_error"]) / 100))
    rivals = {"FakeGPU static": round(static * GIB)}
    if figures["fakecuda_error"]:
        rivals["FakeGPU"] = round(measured * (1 + float(figures["fakecuda_error"]) / 100) * GIB)
    words = [figures["model"], figures["method"], figures["length"], "--accumulation", figures["accumulation"]]
    if figures["checkpointing"] == "yes":
        words.append("--checkpointing")
    name = " ".join((*words, figures["card"]))
    card = CARDS[figures["card"]]
    return Row(
        name, card, figures["torch"], {"words": words}, "allocated", round(measured * GIB), RESOLUTION, rivals=rivals
    )


def predict(row: Row) -> Prediction:
    """What the script of the same training takes, with the transformers of that day: later ones compute its layers otherwise."""
    if not TRANSFORMERS.exists():
        return Prediction(refused="needs transformers 5.12 beside the installed one: make setup")
    running.preload("torch.distributed.tensor")  # which PEFT takes to be there
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "peak")
        peaks = running.run(SCRIPT, [str(found), *row.case["words"]], row.card, row.torch, first_path=TRANSFORMERS)
        if not found.exists():
            return Prediction(refused=peaks.error or peaks.outcome, seconds=peaks.seconds)
        return Prediction(int(found.read_text()), seconds=peaks.seconds)


SOURCE = Source(
    "fakegpu", "FakeGPU's validation",
    "github.com/FanBB2333/FakeGPU, docs/llm-sft-memory-estimation.md at 7d5cf83", read, predict,
)  # fmt: skip
