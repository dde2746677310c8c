"""What `tonnage plan train` says of the host's memory while loading, against what `tonnage run` counts.

    python benchmarks/plan_loading.py [--only WAY ...] [--small] [--output FILE]

Each way of `plan_loading_ways.py` loads a random Llama (0.63 B, stored in BF16) on two virtual GPUs of one host. The plan speaks
of weights, so Python, libraries and what the allocator rounds up are left out of the run's figure. DeepSpeed lives in a folder
apart, which only its ways see. `--small` takes a model of 0.12 B.
"""

import json
import os
import subprocess
import sys
from argparse import ArgumentParser
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from host_memory import make_model

WAYS = Path(__file__).with_name("plan_loading_ways.py")
RESULTS = Path(__file__).parent / "results" / "plan-loading.json"
ENGINES = Path(sys.prefix) / "engines"
# Layers and width.
MODEL, SMALL_MODEL = (10, 2048), (4, 1024)
# GPUs and the plan's words for each way; None where the planner has no such way.
CASES: dict[str, tuple[str, str | None]] = {
    "single": ("h200", "--framework torch --zero 0"),
    "ddp": ("2xh200", "--framework torch --zero 0"),
    "ddp_bf16": ("2xh200", "--framework torch --zero 0 --precision bf16"),
    "fsdp2": ("2xh200", "--framework fsdp2 --zero 3"),
    "fsdp2_bf16": ("2xh200", "--framework fsdp2 --zero 3 --precision bf16"),
    "zero2": ("2xh200", "--framework deepspeed --zero 2"),
    "zero3": ("2xh200", "--framework deepspeed --zero 3"),
    "fsdp_rank0": ("2xh200", None),
}
_NO_TENSORS = ("python", "libraries", "cuda", "rounding", "shared_memory", "workers", "mapped_files")


def tonnage(command: str, *words: str, engines: bool = False) -> dict[str, Any]:
    """The JSON that a command writes."""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ENGINES) if engines else ""]))
    with TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        line = [sys.executable, "-m", "tonnage", *command.split(), "--json", str(answer), *words]
        done = subprocess.run(line, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": path})
        if not answer.exists():
            raise SystemExit(done.stderr[-2000:])
        figures: dict[str, Any] = json.loads(answer.read_text())
        return figures


def compare(way: str, folder: Path) -> dict[str, Any]:
    """Weights on the host by rank and pages of files: as planned, and as the run counts them."""
    gpus, words = CASES[way]
    option = "--gpus" if "x" in gpus else "--gpu"
    run = tonnage("run", option, gpus, str(WAYS), way, str(folder), engines=way.startswith("zero"))
    if run["outcome"] != "ok":
        raise SystemExit(run["error"])
    ranks = run.get("ranks") or [
        {"host_parts": run["host"]["peak"]["parts"], "host_mapped_bytes": run["host"]["mapped_peak_bytes"]}
    ]
    counted = [sum(size for part, size in rank["host_parts"].items() if part not in _NO_TENSORS) for rank in ranks]
    row = {"run_bytes": counted, "run_file_bytes": max(rank["host_mapped_bytes"] for rank in ranks)}
    if words is None:
        return row
    plan = tonnage(
        "plan train", str(folder / "config.json"), "--gpus", gpus, "--seq", "64", "--micro-batch", "1", *words.split()
    )["loading"]
    return row | {
        "plan_bytes": plan["host_bytes_by_rank"],
        "plan_file_bytes": plan["checkpoint_bytes"],
        "way": plan["way"],
    }


def main() -> None:
    """All ways, of one checkpoint."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    names = ("torch", "transformers", "accelerate")
    described: dict[str, Any] = {"versions": {name: version(name) for name in names}, "ways": {}}
    with TemporaryDirectory() as folder:
        make_model(Path(folder) / "model", *(SMALL_MODEL if options.small else MODEL), "bfloat16")
        for way in options.only:
            row = described["ways"][way] = compare(way, Path(folder) / "model")
            options.output.write_text(json.dumps(described, indent=1) + "\n")
            shown = {
                key: [round(size / 2**30, 2) for size in row[key]] for key in ("plan_bytes", "run_bytes") if key in row
            }
            print(way, shown, flush=True)


if __name__ == "__main__":
    main()
