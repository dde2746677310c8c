"""Runs the trainings of `cases.toml` on a real GPU, without a cap and under each of their caps: `measure.py --out FILE`.

Several run at once: the card is shared, each process has its own cap, and only memory is asked about.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
GIB = 2**30
# Writes what torch counted when a script ends, however it ends.
_STATS = """
import atexit, json, os, runpy, sys
import torch
def keep():
    s = torch.cuda.memory_stats()
    names = ("allocated_bytes.all.peak", "reserved_bytes.all.peak", "num_alloc_retries", "num_ooms")
    open(os.environ["STATS"], "w").write(json.dumps({n: s.get(n, 0) for n in names}))
atexit.register(keep)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def cases() -> dict[str, dict[str, Any]]:
    """Name -> words, settings, caps, judged."""
    return tomllib.loads((HERE / "cases.toml").read_text())


def measured(case: dict[str, Any], cap_gib: float) -> dict[str, Any]:
    """Run it; where it died, and what torch counted."""
    script, *words = case["words"].split()
    with tempfile.TemporaryDirectory() as folder:
        stats = Path(folder) / "stats.json"
        environment = os.environ | {"STATS": str(stats), "PYTORCH_ALLOC_CONF": case.get("settings", "")}
        command = [sys.executable, "-c", _STATS, str(HERE / script), *words, "--cap", repr(cap_gib)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
        counted = json.loads(stats.read_text()) if stats.exists() else {}
    told = re.findall(r"^(step|evaluated|saved|done).*", done.stdout, re.MULTILINE)
    steps = [int(number) for number in re.findall(r"^step (\d+)", done.stdout, re.MULTILINE)]
    finished = "done" in told
    message = re.search(r"OutOfMemoryError: (.*)", done.stderr)
    found = {"cap_gib": cap_gib, "steps": max(steps, default=0), "last": told[-1] if told else "", "died": not finished}
    if not finished:
        found["message"] = message[1] if message else done.stderr[-600:]
        found["line"] = re.findall(r'File "[^"]*certify/(\w+\.py)", line (\d+)', done.stderr)[-1:]
    return found | counted


def all_of(name: str, case: dict[str, Any]) -> dict[str, Any]:
    """Without a cap, then under each."""
    free = measured(case, 0.0)
    peak = free.get("allocated_bytes.all.peak", 0)
    capped = [measured(case, round(share * peak / GIB, 4)) for share in case["caps"]]
    print(
        name,
        free["steps"],
        round(peak / GIB, 2),
        [(one["cap_gib"], one["died"], one["steps"]) for one in capped],
        flush=True,
    )
    return {"name": name, "judged": case.get("judged", False), "uncapped": free, "capped": capped}


def main() -> None:
    """Measure all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--at-once", type=int, default=12)
    options = parser.parse_args()
    import torch

    chosen = {name: case for name, case in cases().items() if options.only in name}
    rows: list[dict[str, Any]] = []
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
    with ThreadPoolExecutor(options.at_once) as pool:
        for row in pool.map(lambda pair: all_of(*pair), chosen.items()):
            rows.append(row)
            options.out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
