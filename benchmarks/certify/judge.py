"""Holds `tonnage certify` against what a card did: `judge.py [--only NAME] [--judged]`.

Each training is run once on the virtual GPU, without a cap, and an allocator lives through it under every cap that was measured.
The step that dies must be the one that died on the card, and nothing that is called safe may have died.
"""

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(HERE)]
MEASURED = ROOT / "benchmarks" / "results" / "certify-h200.json"
GIB = 2**30


def predicted(name: str) -> dict[str, Any]:
    """What certify says of each cap of a training, and of none."""
    from measure import cases

    from tonnage.allocator import AllocatorSettings
    from tonnage.certify.program import Op
    from tonnage.certify.replay import live_through
    from tonnage.certify.running import run_training
    from tonnage.hardware import find_cuda_gpu
    from tonnage.script.running import Program

    case, row = cases()[name], measured()[name]
    script, *words = case["words"].split()
    gpu = find_cuda_gpu("h200")
    settings = AllocatorSettings.parse(case.get("settings", ""), (2, 11))
    began = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        training = run_training(Program.of_file(HERE / script), words, gpu=gpu, torch_version="2.11.0")
    seconds = time.perf_counter() - began
    found: dict[str, Any] = {
        "name": name, "judged": case.get("judged", False), "seconds": round(seconds, 1), "error": training.ending.error,
        "replayed": training.replayed_parts, "faithful": training.is_faithful, "notes": training.notes, "rows": [],
    }  # fmt: skip
    plain = list(training.program.operations)
    accumulate = int(words[words.index("--accumulate") + 1]) if "--accumulate" in words and script == "text.py" else 1
    for was in [row["uncapped"], *row["capped"]]:
        cap = int(was["cap_gib"] * GIB / gpu.memory_bytes * gpu.memory_bytes) if was["cap_gib"] else -1
        training.program.operations = type(training.program.operations)("q", [Op.ALLOWED, cap, *plain])
        lived = live_through(training.program, gpu.memory_bytes, settings)
        said: dict[str, Any] = {
            "allocated": max(lived.allocated_bytes),
            "reserved": max(lived.reserved_bytes),
            "died": lived.failure is not None,
        }
        said["verdict"] = "dies" if lived.failure else "tight" if lived.retries else "safe"
        if lived.failure is not None:
            part = training.program.parts[lived.failure.part]
            # text.py counts micro-batches, the Trainer steps of the optimizer.
            number = (part.step - 1) * accumulate + part.micro_batch if script == "text.py" else part.step
            said |= {
                "kind": part.kind,
                "steps": number - 1
                if part.kind == "step"
                else part.step * accumulate
                if part.kind == "between"
                else number,
            }
            if part.kind == "data":
                said["steps"] = number
            said |= {"line": lived.failure.line.split()[0].partition(":")[2], "shape": part.shape}
        found["rows"].append({"measured": was, "predicted": said})
    return found


def measured() -> dict[str, dict[str, Any]]:
    """The card's rows, by name."""
    return {row["name"]: row for row in json.loads(MEASURED.read_text())["rows"]}


def verdict(row: dict[str, Any]) -> str:
    """Right, wrong by how many steps, or the dangerous kind."""
    was, said = row["measured"], row["predicted"]
    if was["died"] != said["died"]:
        return ("CALLED SAFE" if said["verdict"] == "safe" else "called tight") if was["died"] else "called deadly"
    return "right" if not was["died"] or was["steps"] == said["steps"] else f"step {said['steps']} for {was['steps']}"


def show(found: dict[str, Any]) -> None:
    """A line for each cap."""
    for row in found["rows"]:
        was, said = row["measured"], row["predicted"]
        words = [f"{found['name']:<28}{was['cap_gib']:>8}  {verdict(row):<22} {was['steps']:>4} {said.get('kind', '')}"]
        if was["died"] and was.get("line"):
            words.append(f"line {said.get('line')} for {was['line'][-1][1]}")
        if not was["cap_gib"]:
            for name in ("allocated", "reserved"):
                words.append(f"{name} {said[name] / was[f'{name}_bytes.all.peak'] - 1:+.2%}")
        print("  ".join(words), flush=True)


def main() -> None:
    """Judge the known ones, or those that are judged only."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--one", default="")
    parser.add_argument("--judged", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(predicted(options.one)))
        return
    rows = []
    for name, row in measured().items():
        if row["judged"] != options.judged or options.only not in name:
            continue
        command = [sys.executable, __file__, "--one", name]
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT / "tests")}, check=False
        )
        if done.returncode:
            print(f"{name}: {done.stderr[-800:]}", flush=True)
            continue
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        show(rows[-1])
        if options.out:
            options.out.write_text(json.dumps(rows, indent=1) + "\n")
    capped = [row for one in rows for row in one["rows"] if row["measured"]["cap_gib"]]
    right = sum(verdict(row) == "right" for row in capped)
    print(
        f"{right} of {len(capped)} right, {sum(verdict(row) == 'CALLED SAFE' for row in capped)} called safe that died"
    )


if __name__ == "__main__":
    main()
