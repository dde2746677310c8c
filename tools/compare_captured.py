"""Hold captured steps against what a real GPU ran: `python tools/compare_captured.py NAME=FILE.tonnage …`.

NAME is a training of `benchmarks/steps`, FILE a recording of it (`tonnage run -o FILE benchmarks/steps/train.py NAME`). Every
operator that launched a kernel on the H200 should be in the capture with the same shapes and types, as often. An operator
may launch several kernels, so its calls there are known only to divide the kernels of each name.
"""

import argparse
import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tonnage.clock.captured import CapturedStep
from tonnage.recording import read_recording

MEASURED = Path(__file__).parent.parent / "benchmarks" / "results" / "steps-operators-h200.jsonl.gz"
Key = tuple[str, str, str]


def measured_calls(training: str, path: Path = MEASURED) -> dict[Key, tuple[list[int], float]]:
    """The kernels of each operator, by kernel, and their seconds."""
    found: dict[Key, tuple[list[int], float]] = {}
    with gzip.open(path, "rt") as file:
        for row in map(json.loads, file):
            if row["training"] != training or "op" not in row or ("::" not in row["op"] and "triton" not in row["op"]):
                continue
            key = (row["op"].removeprefix("aten::"), json.dumps(row["shapes"]), json.dumps(row["types"]))
            counts, seconds = found.get(key, ([], 0.0))
            found[key] = ([*counts, row["calls"]], seconds + row["gpu_s"])
    return found


def captured_calls(step: CapturedStep) -> Counter[Key]:
    """How often each operator was called, written as the H200's rows are: these have nothing of lists."""
    found: Counter[Key] = Counter()
    moments = list(step.moments())
    # Operators that only call one of the same name, as autocast does.
    inner = ((moment.parent, moment.call.name) for moment in moments if moment.parent is not None)
    wrappers = {parent for parent, name in inner if name == moments[parent].call.name}
    for place, moment in enumerate(moments):
        call = moment.call
        if call.kind in ("operator", "kernel") and place not in wrappers:
            types = ["TensorList" if kind.endswith("[]") else kind for kind in call.types]
            shapes = [[] if kind == "TensorList" else shape for shape, kind in zip(call.shapes, types, strict=True)]
            found[call.name, json.dumps(shapes), json.dumps(types)] += 1
    return found


def differences(training: str, step: CapturedStep) -> Iterator[dict[str, Any]]:
    """What the H200 ran and the capture lacks, or has in another number, the most costly first."""
    captured = captured_calls(step)
    by_name: dict[str, list[Key]] = defaultdict(list)
    for key in captured:
        by_name[key[0]].append(key)
    for key, (kernels, seconds) in sorted(measured_calls(training).items(), key=lambda item: -item[1][1]):
        calls = captured[key]
        if calls and (calls in (*kernels, sum(kernels)) or all(count % calls == 0 for count in kernels)):
            continue
        row = {"op": key[0], "shapes": key[1], "types": key[2], "kernels": kernels, "captured": calls, "gpu_s": seconds}
        if not calls:
            row["same name"] = [
                (shapes, types, captured[key[0], shapes, types]) for _, shapes, types in by_name[key[0]]
            ][:4]
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pairs", nargs="+", metavar="NAME=FILE")
    for pair in parser.parse_args().pairs:
        name, _, file = pair.partition("=")
        step = read_recording(file).captured
        total = sum(seconds for _, seconds in measured_calls(name).values())
        if step is None or not total:
            print(f"{name}: {'not measured' if step else 'nothing was captured'}")
            continue
        rows = list(differences(name, step))
        missed = sum(row["gpu_s"] for row in rows)
        print(f"{name}: {len(rows)} of {len(measured_calls(name))} differ, {missed / total:.1%} of the card's time")
        for row in rows:
            print(f"  {row}")


if __name__ == "__main__":
    main()
