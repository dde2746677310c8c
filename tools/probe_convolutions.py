"""Measure, on a real GPU, how many bytes of workspace cuDNN takes for the convolutions of common networks.

    python tools/probe_convolutions.py --out cudnn-convolutions.npz --seconds 240 --jobs 14
    python tools/probe_convolutions.py --out more.npz --models resnet50,convnext_tiny --batches 8,64
    python tools/probe_convolutions.py --out more.npz --layers layers.json --batches 12,100
    python tools/probe_convolutions.py --out cudnn-searches.npz --search --jobs 6

The layers are those of the table that ships with the virtual GPU; `--models` takes them from torchvision's models instead
(needs torchvision), `--layers` from a JSON list. Tasks run in random order until the time is up, so a short run is a sample. Each plan is measured at its
first call, unless that one allocated more than output and workspace: then an engine failed and the second call counts.
With `--search` every engine is timed (`torch.backends.cudnn.benchmark`), and a row has the largest workspace tried before
that of the engine chosen; few jobs at a time, as they disturb each other's times.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "src/tonnage/virtual/data/cudnn-convolutions.npz"
WAYS = ("forward", "backward_data", "backward_filter")
DTYPES = ("float32", "bfloat16", "float16")
LARGEST_TENSOR_BYTES = 1 << 30
LARGEST_SEARCHED_BYTES, MOST_SEARCHED_OPERATIONS = 1 << 28, 3e11  # slow engines take seconds above
Layer = list[Any]


def layers_of_table() -> list[Layer]:
    rows = np.load(TABLE)["layers"].tolist()
    return [
        [row[1 : row[0] + 2], row[5 : row[0] + 7], *(row[i : i + row[0]] for i in (10, 13, 16)), row[19]]
        for row in rows
    ]


def as_row(layer: Layer) -> list[int]:
    """How many sides, then every number in turn, with zeros for sides that are missing."""
    widths = (4, 5, 3, 3, 3)
    filled = [n for part, width in zip(layer, widths, strict=False) for n in (*part, *(0,) * (width - len(part)))]
    return [len(layer[2]), *filled, layer[5]]


def layers_of_models(names: list[str]) -> list[Layer]:
    """What the models convolve, seen on the meta device."""
    import torch
    import torchvision
    from torch.utils._python_dispatch import TorchDispatchMode

    found: dict[str, Layer] = {}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.aten.convolution.default and not args[6]:
                x, w, _, stride, padding, dilation, _, _, groups = args
                layer = [list(x.shape[1:]), list(w.shape), list(stride), list(padding), list(dilation), groups]
                found.setdefault(str(layer), layer)
            return function(*args, **(kwargs or {}))

    for name in names:
        with torch.device("meta"), Watch(), torch.no_grad():
            torchvision.models.get_model(name, weights=None)(torch.empty(2, 3, 224, 224))
    return list(found.values())


def output_shape(batch: int, layer: Layer) -> list[int]:
    x, w, stride, padding, dilation, _ = layer
    sides = zip(x[1:], w[2:], stride, padding, dilation, strict=True)
    return [batch, w[0], *((s + 2 * p - d * (k - 1) - 1) // m + 1 for s, k, m, p, d in sides)]


class Bench:
    """One process's view of the card: operands are views of one buffer, so that only outputs and workspaces are allocated."""

    def __init__(self, jobs: int) -> None:
        import torch

        self.torch = torch
        torch.cuda.set_per_process_memory_fraction(0.9 / jobs)
        base = torch.zeros(LARGEST_TENSOR_BYTES, dtype=torch.uint8, device="cuda")
        self.flat = {name: base.view(getattr(torch, name)) for name in DTYPES}

    def view(self, shape: list[int], dtype: str, last: bool) -> Any:
        torch = self.torch
        layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape)) if last else None
        strides = torch.empty(shape, device="meta").to(memory_format=layout or torch.preserve_format).stride()
        return self.flat[dtype].as_strided(shape, strides)

    def workspace_bytes(self, layer: Layer, batch: int, dtype: str, last: bool, way: str) -> list[int]:
        x, w, stride, padding, dilation, groups = layer
        operands = (self.view(s, dtype, last) for s in ([batch, *x], w, output_shape(batch, layer)))
        arguments = (stride, padding, dilation, False, [0] * len(stride), groups)
        first, allocations = self._measure(way, *operands, arguments)
        if allocations <= 2 and not self.torch.backends.cudnn.benchmark:
            return [first]
        operands = (self.view(s, dtype, last) for s in ([batch, *x], w, output_shape(batch, layer)))
        second = self._measure(way, *operands, arguments)[0]
        return [first, second] if self.torch.backends.cudnn.benchmark else [second]

    def _measure(self, way: str, x: Any, w: Any, y: Any, arguments: Any) -> tuple[int, int]:
        cuda, aten = self.torch.cuda, self.torch.ops.aten
        cuda.reset_peak_memory_stats()
        before = cuda.memory_stats()
        if way == "forward":
            result = aten.convolution(x, w, None, *arguments)
        else:
            mask = [way == "backward_data", way == "backward_filter", False]
            result = aten.convolution_backward(y, x, w, None, *arguments, mask)[mask.index(True)]
        after = cuda.memory_stats()
        peak = after["requested_bytes.all.peak"] - before["requested_bytes.all.current"]
        count = after["allocation.all.allocated"] - before["allocation.all.allocated"]
        return peak - result.numel() * result.element_size(), count


def tasks(layers: list[Layer], batches: list[int], seed: int, search: bool) -> list[Any]:
    """Every combination that fits, in random order."""
    made, most_bytes = [], LARGEST_SEARCHED_BYTES if search else LARGEST_TENSOR_BYTES
    for number, batch, dtype, last, way in itertools.product(range(len(layers)), batches, DTYPES, (False, True), WAYS):
        layer = layers[number]
        largest = max(batch * _product(layer[0]), _product(output_shape(batch, layer)), _product(layer[1]))
        operations = 2 * _product(output_shape(batch, layer)) * _product(layer[1][1:])
        if search and operations > MOST_SEARCHED_OPERATIONS:
            continue
        if largest * (4 if dtype == "float32" else 2) <= most_bytes:
            made.append([number, batch, dtype, last, way])
    random.Random(seed).shuffle(made)
    return made


def _product(numbers: list[int]) -> int:
    total = 1
    for number in numbers:
        total *= number
    return total


def work(options: argparse.Namespace) -> None:
    """A share of the tasks; a line for each."""
    plan = json.loads(options.plan.read_text())
    bench, until = Bench(options.jobs), time.time() + options.seconds
    bench.torch.backends.cudnn.benchmark = options.search
    with Path(f"{options.plan}.{options.share}").open("w") as out:
        for number, batch, dtype, last, way in plan["tasks"][options.share :: options.jobs]:
            if time.time() > until:
                break
            try:
                sizes = bench.workspace_bytes(plan["layers"][number], batch, dtype, last, way)
            except RuntimeError as error:
                print(f"{plan['layers'][number]} {batch} {dtype} {way}: {error}", file=sys.stderr)
                continue
            print(
                json.dumps([number, batch, f"{way} {dtype} {'channels_last' if last else 'contiguous'}", *sizes]),
                file=out,
                flush=True,
            )


def write_table(path: Path, layers: list[Layer], rows: list[Any], source: str) -> None:
    """The table's form: one array a way, type and layout, of layers (as steps from the row before), batches and bytes."""
    columns: dict[str, list[Any]] = {}
    for number, batch, key, *sizes in sorted(rows, key=lambda row: (row[2], row[0], row[1])):
        columns.setdefault(key, []).append((number, batch, *sizes))
    arrays = {key: np.array(found, dtype=np.int64).T.copy() for key, found in columns.items()}
    for array in arrays.values():
        array[0] = np.diff(array[0], prepend=0)
    listed = np.array([as_row(layer) for layer in layers], dtype=np.int32)
    np.savez_compressed(path, layers=listed, source=np.array(source), **arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--models", default="", help="comma-separated torchvision models, instead of the table's layers"
    )
    parser.add_argument("--layers", type=Path, help="a JSON list of layers, as in the table")
    parser.add_argument("--batches", default="8,16,32,64,128,256")
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--jobs", type=int, default=14, help="processes at a time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--search", action="store_true", help="time every engine, as torch.backends.cudnn.benchmark does"
    )
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--plan", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.share is not None:
        work(options)
        return
    import torch

    layers = layers_of_models(options.models.split(",")) if options.models else layers_of_table()
    if options.layers:
        layers = json.loads(options.layers.read_text())
    with tempfile.TemporaryDirectory() as folder:
        options.plan = Path(folder) / "plan.json"
        order = tasks(layers, [int(b) for b in options.batches.split(",")], options.seed, options.search)
        options.plan.write_text(json.dumps({"layers": layers, "tasks": order}))
        command = [
            sys.executable,
            __file__,
            "--out",
            str(options.out),
            "--plan",
            str(options.plan),
            "--jobs",
            str(options.jobs),
        ]
        command += ["--seconds", str(options.seconds), *(["--search"] if options.search else [])]
        running = [subprocess.Popen([*command, "--share", str(share)]) for share in range(options.jobs)]
        end = time.time() + options.seconds + 30
        for process in running:
            try:
                process.wait(max(1, end - time.time()))
            except subprocess.TimeoutExpired:  # one plan may take minutes
                process.kill()
        parts = [Path(f"{options.plan}.{share}").read_text() for share in range(options.jobs)]
        rows = [json.loads(line) for part in parts for line in part.splitlines() if line.endswith("]")]
    source = f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"
    write_table(options.out, layers, rows, source)
    print(f"{len(rows):,} of {len(order):,} plans measured")


if __name__ == "__main__":
    main()
