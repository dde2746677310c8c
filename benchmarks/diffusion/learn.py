"""What a pass of each part holds at every moment and which kernels its forward launches, by size: data of the diffusion plans.

    PYTHONPATH=src:benchmarks/diffusion python benchmarks/diffusion/learn.py sdxl vae-4:decode,encode ...

Real modules run on a virtual GPU at three sizes. The events of a pass are the same at every size, so what is held at each of them
is a + b·B + c·B·P in the batch B and the latent positions P of one sample, and for adapters d + e·B·P for each rank. Kept are the
moments that are the highest somewhere, and the launches with their shapes as polynomials. One file for each part, with a line
for each pass; lines of other passes stay.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import numpy as np

from tonnage.clock.host import host_costs
from tonnage.clock.step import launches_of, settings_of
from tonnage.hardware import find_gpu
from tonnage.ledger import Category
from tonnage.script.lines import NOWHERE
from tonnage.virtual.builds import new_session

DATA = Path(__file__).parents[2] / "src/tonnage/budget/data/diffusion"
# With one sample some sums over the batch are left out, which would be other events.
IMAGE_SIZES = [(2, 1, 64, 64), (2, 1, 128, 128), (4, 1, 128, 128)]
VIDEO_SIZES = [(2, 5, 32, 32), (2, 13, 48, 64), (4, 13, 48, 64)]
TURNS = [(1, 3, 32, 32), (1, 3, 64, 64), (2, 3, 64, 64)]  # for launches
TURN_SIZES = [(1, 9, 32, 64), (1, 21, 32, 64), (1, 21, 64, 64)]  # for memory
# Positions of a text encoder are its tokens; T5 is asked at the two lengths that pipelines use.
CLIP_SIZES = [(2, 1, 1, 32), (2, 1, 1, 77), (4, 1, 1, 77)]
T5_SIZES = [(2, 1, 1, 256), (2, 1, 1, 512), (4, 1, 1, 512)]
TRAININGS = ("lora", "lora-checkpoint", "full-mixed", "full-mixed-checkpoint", "full-bf16-checkpoint")
RANKS = (16, 64)
# Where moments are compared: batches, latent positions and ranks that people use.
GRID = [
    (b, p, r) for b in (1, 2, 4, 8, 16, 64, 256) for p in (256, 1024, 4096, 16384, 65536, 262144) for r in (4, 16, 128)
]
EXACT_KINDS = ("matmul", "attention", "convolution")


def basis(size: tuple[int, int, int, int]) -> list[float]:
    """What memory is linear in."""
    batch, positions = size[0], size[1] * size[2] * size[3]
    return [1.0, batch, batch * positions]


class Card:
    """A virtual H200 that everything fits on."""

    def __init__(self) -> None:
        self.session = new_session(replace(find_gpu("h200"), memory_bytes=2**42))
        self.session.open()
        self.device = self.session.device
        self.device.attribution.place = lambda *_: NOWHERE  # nobody asks for lines of source

    def moments(self, run: Callable[[], object], *, captures: bool) -> tuple[list[tuple[str, int]], Any]:
        """Operators that make something lasting, each with the most bytes above the start until the next."""
        from tonnage.script.profiler import calls_of

        live = dict(self.device.live)
        operators: list[int] = []  # of each block that is made, the number of the outermost operator
        plain = self.device.allocated
        self.device.allocated = lambda *args: (operators.append(args[6]), plain(*args))[1]  # type: ignore[method-assign]
        first = len(self.device.allocations)
        calls = calls_of(run) if captures else run()
        self.device.allocated = plain  # type: ignore[method-assign]
        made = self.device.allocations[first:]
        # Operators whose blocks all go before they end may make some at one size and none at another.
        lasting = {op for op, block in zip(operators, made, strict=True) if block.category is not Category.WORKSPACE}
        names: dict[int, str] = {}
        events: dict[int, tuple[int, int]] = {}
        for operator, block in zip(operators, made, strict=True):
            events[block.born] = (block.block_bytes, operator if operator in lasting else 0)
            names.setdefault(operator, f"{block.operator} {block.module}")
            if block.died is not None:
                events[block.died] = (-block.block_bytes, 0)
        for block in live.values():
            if block.died is not None:
                events[block.died] = (-block.block_bytes, 0)
        held, most, last = 0, 0, 0
        kept: list[tuple[str, int]] = []
        for _, (size, operator) in sorted(events.items()):
            if operator and operator != last:
                kept.append((names.get(last, ""), most))
                most, last = 0, operator
            held += size
            most = max(most, held)
        return [*kept[1:], (names.get(last, ""), most)], calls


def aligned(runs: list[list[tuple[str, int]]]) -> list[list[int]]:
    """Moments that all runs have; what one has beside them counts to the moment before. Sums take other kernels at some sizes."""
    if len({tuple(name for name, _ in run) for run in runs}) > 1:
        common = [name for name, _ in runs[0]]
        for run in runs[1:]:
            other = [name for name, _ in run]
            common = [common[at] for at, _ in pairs(common, other)]
        found = []
        for run in runs:
            places = {theirs: ours for ours, theirs in pairs(common, [name for name, _ in run])}
            levels, place = [0] * len(common), 0
            for at, (_, level) in enumerate(run):
                place = places.get(at, place)
                levels[place] = max(levels[place], level)
            found.append(levels)
        return found
    return [[level for _, level in run] for run in runs]


def pairs(ours: list[str], theirs: list[str]) -> list[tuple[int, int]]:
    """Places of what two lists have in common, in order."""
    blocks = SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks()
    return [(block.a + step, block.b + step) for block in blocks for step in range(block.size)]


def coefficients(sizes: list[Any], levels: list[list[float]], columns: tuple[int, ...] = (0, 1, 2)) -> Any:
    """Of every moment, a row."""
    left = np.array([basis(size) for size in sizes])[:, columns]
    found = np.zeros((3, len(levels[0])))
    found[list(columns)] = np.linalg.lstsq(left, np.array(levels, dtype=float), rcond=None)[0]
    return found.T


def envelope(rows: Any) -> list[list[float]]:
    """The moments that are the highest somewhere on the grid."""
    grid = np.array([[x * y for y in (1, rank) for x in (1, b, b * p)] for b, p, rank in GRID], dtype=float)
    chosen = {int(at) for at in np.argmax(grid[:, : rows.shape[1]] @ rows.T, axis=1)}
    return [[round(value, 3) for value in rows[at]] for at in sorted(chosen)]


def polynomial(batches: list[int], positions: list[int], values: list[float]) -> list[float]:
    """A number of a launch as a + b·B + c·P + d·B·P: of three sizes, the last of which has another batch alone.

    One that the batch does not change is linear in P; one that doubles with it, in B·P.
    """
    first, second, third = values
    across = (second - first) / (positions[1] - positions[0])
    if second == third:
        found = [second - across * positions[1], 0.0, across, 0.0]
    else:
        slope = (third - second) / (batches[2] - batches[1])  # of the batch, at the second size
        alone = second - slope * batches[1]
        each = across / batches[1]
        found = [alone, slope - each * positions[1], 0.0, each]
    return [float(f"{value:.7g}") if abs(value) > 1e-9 * max(map(abs, values)) else 0.0 for value in found]


def launch_rows(sizes: list[Any], captured: list[Any]) -> list[list[Any]]:
    """Distinct launches: [count, kind, name, precision, variant, kernels, polynomials of the shape, moved bytes and operations].

    Those of kinds that move bytes are merged where they differ in size alone.
    """
    listed = [[launch for _, launch in launches_of(step, settings_of(step)) if launch is not None] for step in captured]
    if len(set(map(len, listed))) > 1:
        for at in range(1, len(listed)):
            both = pairs(*([launch.name for launch in listed[place]] for place in (0, at)))
            listed[:at] = [[other[first] for first, _ in both] for other in listed[:at]]
            listed[at] = [listed[at][second] for _, second in both]
    batches, positions = [size[0] for size in sizes], [size[1] * size[2] * size[3] for size in sizes]
    exact: Counter[str] = Counter()
    merged: dict[str, list[Any]] = {}
    for same in zip(*listed, strict=True):
        last = same[1]
        numbers = zip(*((*launch.shape, launch.moved_bytes, launch.operations) for launch in same), strict=True)
        polynomials = [polynomial(batches, positions, list(values)) for values in numbers]
        head = json.dumps([last.kind, last.name, last.precision, last.variant, last.kernels])
        if last.kind in EXACT_KINDS:
            exact[head[:-1] + ", " + json.dumps(polynomials) + "]"] += 1
        else:
            entry = merged.setdefault(head, [0, np.zeros((len(polynomials), 4))])
            entry[0] += 1
            entry[1] = entry[1] + np.array(polynomials)
    found = [[count, *json.loads(key)] for key, count in exact.items()]
    for key, (count, total) in merged.items():
        found.append([count, *json.loads(key), [[float(f"{value:.6g}") for value in row] for row in total / count]])
    return found


def host_s(step: Any) -> float:
    """What the host takes to launch all of it."""
    costs = host_costs()
    found = list(launches_of(step, settings_of(step)))
    return float(sum(costs.call_s(at) + (costs.launch_s(at, each) if each is not None else 0.0) for at, each in found))


def learn_pass(card: Card, name: str, way: str, sizes: list[Any]) -> dict[str, Any]:
    """One line of the data."""
    import torch
    from passes import prepared

    warm = torch.ones(8, 8, device="cuda", requires_grad=True)
    (warm @ warm).sum().backward()  # cuBLAS has its workspace in both threads
    adapters, captures = way.startswith("lora"), not way.startswith(("lora", "full"))
    module, step = prepared(name, way, RANKS[0] if adapters else 0)
    levels, captured = [], []
    for size in sizes:
        module.zero_grad(set_to_none=True)
        level, calls = card.moments(lambda size=size: step(size), captures=captures)
        levels.append(level)
        captured.append(calls)
    rows = coefficients(sizes, aligned(levels)) if not adapters else None
    line: dict[str, Any] = {"pass": way, "torch": torch.__version__, "sizes": sizes}
    if adapters:
        line["adapters"] = sum(p.numel() for p in module.parameters() if p.requires_grad) // RANKS[0]  # for each rank
        del module, step
        module, step = prepared(name, way, RANKS[1])
        for size in sizes[1:]:
            module.zero_grad(set_to_none=True)
            levels.append(card.moments(lambda size=size: step(size), captures=False)[0])
        same = aligned(levels)
        grown = (np.array(same[3:]) - np.array(same[1:3])) / (RANKS[1] - RANKS[0])
        slope = coefficients(sizes[1:], grown.tolist(), (0, 2))
        rows = np.hstack([coefficients(sizes, same[:3]) - RANKS[0] * slope, slope])
    line["moments"] = envelope(rows)
    if captures:
        line |= {"host_s": round(host_s(captured[0]), 6), "launches": launch_rows(sizes, captured)}
    return line


def learn_turns(card: Card, name: str, way: str) -> dict[str, Any]:
    """The same of a VAE that goes through a video in turns, whose events grow with its frames: its peak alone."""
    import torch
    from passes import prepared

    _, step = prepared(name, way)
    captured = [card.moments(lambda size=size: step(size), captures=True)[1] for size in TURNS]
    found = [card.moments(lambda size=size: step(size), captures=False)[0] for size in TURN_SIZES]
    levels = [max(level for _, level in each) for each in found]
    left = [[1.0, b * h * w, b * f * h * w] for b, f, h, w in TURN_SIZES]
    row = np.linalg.lstsq(np.array(left), np.array(levels, dtype=float), rcond=None)[0]
    return {
        "pass": way, "torch": torch.__version__, "sizes": TURN_SIZES, "frames": TURNS[0][1],
        "moments": [[round(float(value), 3) for value in row]], "host_s": round(host_s(captured[0]), 6),
        "launches": launch_rows([(b, 1, h, w) for b, _, h, w in TURNS], captured),
    }  # fmt: skip


def main(names: list[str]) -> None:
    card = Card()
    for word in names:
        name, _, ways = word.partition(":")
        sizes, default = IMAGE_SIZES, ("forward", *TRAININGS)
        if name.startswith(("wan", "hunyuan")):
            sizes = VIDEO_SIZES
        elif name.startswith("vae"):
            default = ("decode", "decode-fp32", "encode", "encode-fp32")
        elif name.startswith(("clip", "t5", "umt5")):
            sizes, default = CLIP_SIZES if name.startswith("clip") else T5_SIZES, ("forward",)
        for way in ways.split(",") if ways else default:
            line = learn_turns(card, name, way) if name == "vae-wan" else learn_pass(card, name, way, sizes)
            rows = len(line.get("launches", ()))
            print(name, way, "moments", len(line["moments"]), "launches", rows, flush=True)
            path = DATA / f"{name}.jsonl"
            lines = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
            lines = sorted([*(o for o in lines if o["pass"] != way), line], key=lambda line: line["pass"])
            DATA.mkdir(exist_ok=True)
            path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


if __name__ == "__main__":
    main(sys.argv[1:])
