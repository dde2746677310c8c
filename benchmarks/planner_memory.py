"""Hold the planner's memory against what was measured: an H200's decoder cases, and published training runs.

    .venv/bin/python benchmarks/planner_memory.py [--truth FOLDER]

Prints a table of each, then how long 100,000 configurations take.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from published_training import TRUTH, NotSaid, predicted_bytes, rows_of, run_of

from tonnage.budget.training.configuration import Configuration
from tonnage.budget.training.memory import Kind, kind_of, training_budget
from tonnage.hardware import find_gpu
from tonnage.models import find_model, from_config

GIB = 2**30
TOO_LOW = -0.05
PRECISIONS = {"fp32": "fp32", "bf16": "bf16", "amp-bf16": "bf16-mixed", "amp-fp16": "fp16-mixed"}


def main() -> None:
    """All tables, in order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--truth", type=Path, default=TRUTH, help="the folder of measurements")
    options = parser.parse_args()
    decoder_table(options.truth)
    published_table(options.truth)
    speed()


# -- the decoder cases that were measured on an H200


def decoder_table(truth: Path) -> None:
    """Allocated and reserved peaks of `lm_train.py`, beside the prediction from its flags alone."""
    sizes = read_sizes(truth / "scripts" / "lm_train.py")
    errors, reserved_errors = [], []
    print(f"{'predicted':>10} {'measured':>10} {'error':>7}  {'reserved':>9} case")
    for row in decoder_rows(truth):
        words = row["case"].split()[1:]
        budget = training_budget(from_config(sizes[value(words, "--size", "gpt2")]), flags(words), find_gpu("h200"))
        allocated, reserved = row["allocated_bytes.all.peak"], row["reserved_bytes.all.peak"]
        error = float(budget.peak_allocated_bytes) / allocated - 1
        reserved_error = float(budget.peak_reserved_bytes) / reserved - 1
        errors.append(abs(error))
        reserved_errors.append(abs(reserved_error))
        predicted = float(budget.peak_allocated_bytes) / GIB
        shown = f"{predicted:7.2f}GiB {allocated / GIB:7.2f}GiB {error:+7.2%}  {reserved_error:+9.1%}"
        print(f"{shown} {' '.join(words)}")
    print(f"allocated: median {median(errors):.2%}, worst {max(errors):.2%}, {len(errors)} cases")
    print(f"reserved: median {median(reserved_errors):.1%}, worst {max(reserved_errors):.1%}\n")


def decoder_rows(truth: Path) -> Iterator[dict[str, Any]]:
    """The cases of `lm_train.py` under the allocator's defaults."""
    for row in rows_of(truth / "h200.jsonl"):
        if row["case"].startswith("lm_train.py") and row["outcome"] == "ok" and not row["alloc_conf"]:
            yield row


def read_sizes(script: Path) -> dict[str, dict[str, Any]]:
    """The models that the script can train, as it names them, without running it."""
    import ast

    for node in ast.parse(script.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and node.targets[0].id == "SIZES":  # type: ignore[attr-defined]
            keys = [ast.literal_eval(key) for key in node.value.keys if key]
            values = [{k.arg: ast.literal_eval(k.value) for k in call.keywords} for call in node.value.values]  # type: ignore[attr-defined]
            return dict(zip(keys, values, strict=True))
    raise SystemExit(f"{script} names no models.")


def value(words: list[str], flag: str, default: str) -> str:
    """What follows a flag."""
    return words[words.index(flag) + 1] if flag in words else default


def flags(words: list[str]) -> Configuration:
    """The script's flags as a configuration."""
    optimizer, _, kernel = value(words, "--optimizer", "adamw").partition("-")
    return Configuration(
        precision=PRECISIONS[value(words, "--precision", "fp32")],  # type: ignore[arg-type]
        optimizer=optimizer,  # type: ignore[arg-type]
        optimizer_kernel=kernel or "foreach",  # type: ignore[arg-type]
        checkpoint="full" if "--checkpoint" in words else "none",
        attention="eager" if value(words, "--attention", "sdpa") == "eager" else "flash",
        keep_gradients="--keep-grads" in words,
        seq=int(value(words, "--seq", "512")),
        micro_batch=int(value(words, "--batch", "4")),
        accumulate=int(value(words, "--accumulate", "1")),
    )


# -- published runs


@dataclass(frozen=True)
class Held:
    """One run that was predicted: its error, and whether the plan says that it is tight."""

    row: dict[str, Any]
    words: list[str]
    predicted_gib: float
    kind: Kind
    piped: bool
    tight: bool

    @property
    def error(self) -> float:
        """Of the prediction."""
        return float(self.predicted_gib / self.row["peak_mem_gib"] - 1)

    @property
    def too_low(self) -> bool:
        """By more than a twentieth, and nothing is said of it."""
        return self.error < TOO_LOW and not self.tight


def published_runs(truth: Path) -> tuple[list[Held], Counter[tuple[str, str]]]:
    """Every row that has words, through the command; and why the others have none."""
    held: list[Held] = []
    left_out: Counter[tuple[str, str]] = Counter()
    for row in rows_of(truth / "published-training.jsonl"):
        try:
            run = run_of(row)
        except NotSaid as reason:
            left_out[row["family"], str(reason)] += 1
            continue
        findings = run.plan()
        plan = findings.closest
        predicted = predicted_bytes(run, findings) / GIB
        held.append(Held(row, run.words, predicted, kind_of(plan.configuration), plan.configuration.pp > 1, plan.tight))
    return held, left_out


def published_table(truth: Path) -> None:
    """Every run that says enough, beside its prediction; medians; then why the others do not."""
    held, left_out = published_runs(truth)
    for run in held:
        sizes = f"{run.predicted_gib:8.2f} {run.row['peak_mem_gib']:8.2f} GiB {run.error:+7.1%}"
        print(f"{sizes} {'tight' if run.tight else '':5}  {run.row['id']:26} {' '.join(run.words)}")
    families: dict[str, list[Held]] = {}
    for run in held:
        families.setdefault(run.row["family"] + (", adapters" if run.kind == "adapters" else ""), []).append(run)
    families["all but adapters"] = [run for run in held if run.kind != "adapters"]
    families |= {"adapters": [run for run in held if run.kind == "adapters"], "all": held}
    for name, runs in families.items():
        errors = np.abs([run.error for run in runs])
        worst = f"90th percentile {np.quantile(errors, 0.9):.1%}, worst {max(errors):.1%}"
        print(f"{name:24} {len(runs):4} runs, median error {median(errors):.1%}, {worst}, {too_low(runs):.1%} too low")
    for kind, (low, high) in spread(held).items():
        print(f"{kind:24} nine of ten took {low:.2f} to {high:.2f} of what is predicted")
    for (family, reason), count in sorted(left_out.items()):
        print(f"  left out: {count:3} of {family}: {reason}")


def too_low(held: list[Held]) -> float:
    """The share that is, without a word of it."""
    return sum(run.too_low for run in held) / len(held)


def spread(held: list[Held]) -> dict[Kind, tuple[float, float]]:
    """The factors between which nine of ten runs are, by kind: `budget/data/ranges.toml`."""
    found: dict[Kind, list[float]] = {}
    for run in held:
        found.setdefault(run.kind, []).append(1 / (1 + run.error))
    return {kind: (float(np.quantile(each, 0.05)), float(np.quantile(each, 0.95))) for kind, each in found.items()}


# -- speed


def speed() -> None:
    """Many configurations of one family at once."""
    count = 100_000
    turn = np.arange(count)
    many = Configuration(
        framework="fsdp2",
        zero=3,
        seq=1024 * 2 ** (turn % 4),
        micro_batch=1 + turn % 16,
        accumulate=1 + turn % 5,
        tp=2 ** (turn % 4),
        pp=2 ** (turn % 3),
        data=np.full(count, 8),
        shard=np.full(count, 8),
    )
    shape, gpu = find_model("llama-3.1-70b"), find_gpu("h200")
    start = time.perf_counter()
    training_budget(shape, many, gpu)
    print(f"\n{count:,} configurations in {time.perf_counter() - start:.2f} s on one core")


if __name__ == "__main__":
    sys.exit(main())
