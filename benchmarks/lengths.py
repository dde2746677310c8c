"""Hold the worst micro-batch of `plan train --lengths` against an epoch of real batches on the virtual GPU.

    python benchmarks/lengths.py

The lengths are drawn once, by a fixed seed. Kept in benchmarks/results/lengths.json: peaks of an epoch for each way to put
samples together, and of steps that are all as large as the worst, which shows what changing shapes cost in reserved memory; and
of the epoch with segments that grow (`expandable_segments:True`).
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tonnage.budget.training.configuration import Configuration
from tonnage.budget.training.memory import TrainingBudget, training_budget
from tonnage.hardware import find_gpu
from tonnage.models.config import from_config
from tonnage.planner.training.lengths import parse_lengths

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "lengths.json"
CONFIG = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": 32000, "tie_word_embeddings": False,
}  # fmt: skip
SAMPLES, MICRO_BATCH, LONGEST = 64, 4, 4096


def drawn() -> list[int]:
    """Lengths of about 600 tokens in the mean."""
    chance = random.Random(0)
    return [max(16, min(round(chance.lognormvariate(6.1, 0.8)), LONGEST)) for _ in range(SAMPLES)]


def batches(lengths: list[int], batching: str) -> list[list[int]]:
    """The micro-batches of an epoch, in an order of chance."""
    if batching == "bucket":
        ordered = sorted(lengths)
        made = [ordered[start : start + MICRO_BATCH] for start in range(0, len(ordered), MICRO_BATCH)]
        random.Random(1).shuffle(made)
        return made
    if batching == "pack":
        packs: list[list[int]] = []
        for length in sorted(lengths, reverse=True):
            room = next((pack for pack in packs if sum(pack) + length <= LONGEST), None)
            packs.append([length]) if room is None else room.append(length)
        # What is left of a pack is padding.
        full = [pack + [LONGEST - sum(pack)] * (sum(pack) < LONGEST) for pack in packs]
        return [full[at] + full[at + 1] for at in range(0, len(full) - 1, 2)]
    shuffled = random.Random(1).sample(lengths, len(lengths))
    return [shuffled[start : start + MICRO_BATCH] for start in range(0, len(shuffled), MICRO_BATCH)]


def planned(row: dict[str, Any]) -> TrainingBudget:
    """What the planner says, told the same lengths."""
    from dataclasses import replace

    lengths = replace(parse_lengths(",".join(map(str, row["lengths"]))), batching=row["batching"]).limited(LONGEST)
    size = 2 if row["batching"] == "pack" else MICRO_BATCH
    seq = lengths.worst(size)
    if row["batching"] == "padding-free":
        # Which samples meet is chance; this is the epoch that was run.
        seq = -(-row["largest"] // size)
    configuration = Configuration(
        precision="bf16", optimizer_kernel="fused", checkpoint=row["checkpoint"], seq=seq, micro_batch=size
    )
    return training_budget(from_config(CONFIG), configuration, find_gpu("h200"))


def run(case: dict[str, Any], settings: str = "") -> dict[str, Any]:
    """Peaks on the virtual GPU."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        step = [str(HERE / "lengths_step.py"), json.dumps(case)]
        command = [sys.executable, "-m", "tonnage", "run", "--gpu", "h200", "--json", str(out), *step]
        ran = subprocess.run(
            command, capture_output=True, text=True, check=False, env=os.environ | {"PYTORCH_ALLOC_CONF": settings}
        )
        if ran.returncode:
            sys.exit(ran.stdout[-2000:] + ran.stderr[-2000:])
        figures = json.loads(out.read_text())
    return {name: figures[name] for name in ("peak_allocated_bytes", "peak_reserved_bytes")}


def main() -> None:
    lengths, rows = drawn(), []
    for batching, checkpoint in (
        ("pad", "none"), ("bucket", "none"), ("padding-free", "none"), ("pack", "none"), ("pad", "full")
    ):  # fmt: skip
        made = batches(lengths, batching)
        padded = batching in ("pad", "bucket")
        sizes = [len(one) * max(one) if padded else sum(one) for one in made]
        case = {"config": CONFIG, "checkpoint": checkpoint, "padded": padded}
        row = {"batching": batching, "checkpoint": checkpoint, "lengths": lengths, "largest": max(sizes)}
        row["varying"] = run({**case, "batches": made})
        row["alike"] = run({**case, "batches": [made[sizes.index(max(sizes))]] * 3})
        row["expandable"] = run({**case, "batches": made}, "expandable_segments:True")
        plan = planned(row)
        held = {key: row[key]["peak_reserved_bytes"] / 2**30 for key in ("varying", "alike", "expandable")}
        peak = row["varying"]["peak_allocated_bytes"]
        off, reserved = float(plan.peak_allocated_bytes) / peak - 1, float(plan.peak_reserved_bytes) / 2**30
        words = ", ".join(f"{key} {size:.2f}" for key, size in held.items())
        print(
            f"{batching:14} {checkpoint:6} {peak / 2**30:7.2f} GiB  planned {off:+.1%}  reserved: {words}, planned {reserved:.2f}"
        )
        rows.append(row)
    versions = {name: version(name) for name in ("torch", "transformers")}
    kept = {"gpu": "h200, virtual", "versions": versions, "micro_batch": MICRO_BATCH, "config": CONFIG, "cases": rows}
    RESULTS.write_text(json.dumps(kept) + "\n")


if __name__ == "__main__":
    main()
