"""Our own measurements on one H200, where every predictor that can be run here is asked about the same scripts.

Nobody else made these runs, and the virtual GPU was made with some of them: they are no judge of Tonnage, but of the others.
"""

import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import rivals
import running
from rows import Prediction, Reading, Row, Source

TRUTH = Path(__file__).parents[2] / "truth"
FILES = {"h200": "scripts", "h200-unseen": "unseen", "h200-libraries": "scripts"}
# What scripts of these files import besides torch, where a fork would have to import it again.
LIBRARIES = ("transformers", "accelerate.utils", "torch.distributed._tools.mem_tracker", "rivals.tracked")
NEEDS = {
    "bnb_": "bitsandbytes", "qlora": "bitsandbytes", "int8_lora": "bitsandbytes", "torchao": "torchao", "liger": "liger_kernel",
    "diffusers": "diffusers", "trl": "trl", "triton": "triton", "compile": "triton", "muon_speedrun": "triton",
}  # fmt: skip


# Where torchvision does not match torch, `make setup` puts it there; on the virtual GPU it loads all the same.
sys.path.append(f"{sys.prefix}/torchvision")


def read() -> Reading:
    """Every measured case that ended well or ran out of memory."""
    rows, left_out = [], Counter[str]()
    for file, folder in FILES.items():
        for line in (TRUTH / f"{file}.jsonl").read_text().splitlines():
            case = json.loads(line)
            script = TRUTH / folder / case["case"].split()[0]
            absent = next(_absent(script.name), None)
            if case["outcome"] == "error":
                left_out["the script fails on the card for reasons of its own"] += 1
            elif absent:
                left_out[f"{absent} is not installed beside this torch"] += 1
            else:
                rows.append(row_of(case, script))
    random.Random(20).shuffle(rows)  # a run that was stopped has a fair part of them
    return Reading(rows, left_out)


def row_of(case: dict[str, str | int], script: Path) -> Row:
    conf, fits = str(case["alloc_conf"]), case["outcome"] == "ok"
    peak = case["allocated_bytes.all.peak"]
    return Row(
        " ".join(filter(None, (str(case["case"]), conf))), "h200", "2.11",
        {"script": script, "words": str(case["case"]).split()[1:], "conf": conf},
        "allocated", int(peak) if fits else None, fits=fits,
    )  # fmt: skip


def predict(row: Row) -> Prediction:
    running.preload(*LIBRARIES)
    conf = {"PYTORCH_ALLOC_CONF": row.case["conf"]} if row.case["conf"] else {}
    peaks = running.run(*command(row), row.card, row.torch, **conf)
    if peaks.outcome == "error":
        return Prediction(
            refused=peaks.error.strip().splitlines()[-1] if peaks.error else "failed", seconds=peaks.seconds
        )
    return Prediction(peaks.allocated, peaks.outcome == "ok", seconds=peaks.seconds)


def command(row: Row) -> tuple[Path, list[str]]:
    return row.case["script"], row.case["words"]


def _absent(script: str) -> Iterator[str]:
    yield from (module for start, module in NEEDS.items() if script.startswith(start) and find_spec(module) is None)


SOURCE = Source(
    key="h200",
    title="Tonnage's own H200",
    where="benchmarks/truth: h200.jsonl, h200-unseen.jsonl, h200-libraries.jsonl",
    read=read,
    predict=predict,
    rivals=rivals.of_script(command, one_in=4),
)
