"""One request in each parallel layout, planned and run: the planner's ledger beside that of the virtual cluster.

    .venv/bin/python benchmarks/cluster_layouts.py [LAYOUT ...] [--zero] [--plan-only] [--results FILE]

`tonnage plan train` gets a layout's words and `tonnage run --gpus` hands the same words to `layouts/train.py`. Prints a table
and keeps every figure as JSON; what is not named keeps the figures that the file has. A run takes about half a minute.
`--zero` adds ZeRO's table of 7.5 billion parameters over 64 ranks, `--plan-only` plans anew beside the runs that were kept.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from tonnage.budget.training.configuration import Configuration
from tonnage.budget.training.memory import training_budget
from tonnage.hardware import find_gpu
from tonnage.ledger import Category
from tonnage.models import find_model
from tonnage.recording import Recording, open_recording
from tonnage.report.plans.training import ledger_figures

HERE = Path(__file__).parent
SCRIPTS = HERE / "layouts"
RESULTS = HERE / "results" / "cluster-layouts.json"
TONNAGE = Path(sys.executable).with_name("tonnage")
GIB = 2**30
PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_process_bytes")
# Choices that a layout does not name, and that the script does not leave open either.
FIXED = {
    "--seq": "2048",
    "--loss": "full",
    "--checkpoint": "none",
    "--optimizer-kernel": "fused",
    "--offload": "none",
    "--tp": "1",
    "--pp": "1",
    "--cp": "1",
    "--ep": "1",
}
TURNS = "--zero 2 --pp 2 --pp-chunks 2"
MIXED, PURE = "--precision bf16-mixed", "--precision bf16"

End = Literal["worst", "first", "last"]
Row = dict[str, Any]


@dataclass(frozen=True)
class Layout:
    """A request; `words` go to both sides. Of a pipeline, both ends are compared."""

    name: str
    gpus: str
    model: str
    words: str
    framework: str = "torch"

    @property
    def flags(self) -> list[str]:
        """What both take."""
        return self.words.split()

    @property
    def ends(self) -> tuple[End, ...]:
        """The stages that are looked at."""
        return ("first", "last") if "--pp" in self.flags else ("worst",)


LAYOUTS = (
    Layout("one GPU", "1xh200", "llama", f"--zero 0 {MIXED} --micro-batch 2"),
    Layout("DDP", "4xh200", "llama", f"--zero 0 {MIXED} --micro-batch 2"),
    Layout("ZeRO-2", "4xh200", "qwen3", f"--zero 2 {MIXED} --micro-batch 2", "fsdp2"),
    Layout("ZeRO-3", "4xh200", "llama", f"--zero 3 {MIXED} --micro-batch 2", "fsdp2"),
    Layout("hybrid", "2x4xh200", "llama", f"--zero 3 --shard 4 {MIXED} --micro-batch 2", "fsdp2"),
    Layout("tensor", "4xh200", "llama", f"--zero 0 --tp 4 --no-sequence-parallel {PURE} --micro-batch 4"),
    Layout("tensor, sequence", "4xh200", "llama", f"--zero 0 --tp 4 {PURE} --micro-batch 4"),
    Layout("pipeline", "4xh200", "llama", f"--zero 0 --pp 4 {PURE} --micro-batch 1 --global-batch 8"),
    Layout("context", "4xh200", "llama", f"--zero 3 --cp 4 {MIXED} --micro-batch 1 --seq 24576", "fsdp2"),
    Layout("expert", "4xh200", "mixtral", f"--zero 3 --ep 4 {MIXED} --micro-batch 4", "fsdp2"),
    Layout("ZeRO-3 × tensor", "2x4xh200", "llama", f"--zero 3 --tp 4 {MIXED} --micro-batch 4", "fsdp2"),
    Layout("ZeRO-2 × pipe", "4xh200", "llama", f"--zero 2 --pp 2 {MIXED} --micro-batch 1 --global-batch 16", "fsdp2"),
    Layout("ZeRO-3 × pipe", "4xh200", "llama", f"--zero 3 --pp 2 {MIXED} --micro-batch 1 --global-batch 8", "fsdp2"),
    Layout("BF16 × pipe", "4xh200", "llama", f"--zero 2 --pp 2 {PURE} --micro-batch 2 --global-batch 8", "fsdp2"),
    Layout("tied × pipe", "2x4xh200", "qwen3", f"--zero 2 --pp 4 {MIXED} --micro-batch 2 --global-batch 16", "fsdp2"),
    Layout("interleaved", "4xh200", "llama", f"{TURNS} {MIXED} --micro-batch 1 --global-batch 16", "fsdp2"),
    Layout("DDP × context", "4xh200", "llama", f"--zero 0 --cp 2 {PURE} --micro-batch 1 --seq 8192"),
    Layout("ZeRO-1", "4xh200", "llama", f"--zero 1 {MIXED} --micro-batch 2"),
    Layout("ZeRO-3 in BF16", "4xh200", "llama", f"--zero 3 {PURE} --micro-batch 2", "fsdp2"),
    Layout("accumulated", "4xh200", "llama", f"--zero 3 {MIXED} --micro-batch 2 --global-batch 16", "fsdp2"),
    Layout("foreach", "2xh200", "llama", f"--zero 0 {MIXED} --micro-batch 1 --optimizer-kernel foreach"),
    Layout("tensor × pipe", "4xh200", "short", f"--zero 0 --tp 2 --pp 2 {PURE} --micro-batch 4 --global-batch 16"),
    Layout(
        "all three", "2x4xh200", "short", f"--zero 3 --tp 2 --pp 2 {MIXED} --micro-batch 4 --global-batch 16", "fsdp2"
    ),
    Layout("expert, two copies", "4xh200", "mixtral", f"--zero 3 --ep 2 {MIXED} --micro-batch 4", "fsdp2"),
    Layout("full", "2xh200", "short", f"--zero 3 --checkpoint full --loss chunked {MIXED} --micro-batch 8", "fsdp2"),
    Layout(
        "selective",
        "2xh200",
        "short",
        f"--zero 3 --checkpoint selective --loss chunked {MIXED} --micro-batch 8",
        "fsdp2",
    ),
    Layout(
        "every-2", "2xh200", "short", f"--zero 2 --checkpoint every-2 --loss chunked {MIXED} --micro-batch 8", "fsdp2"
    ),
    Layout(
        "full × pipe",
        "4xh200",
        "short",
        f"--zero 2 --pp 2 --checkpoint full {MIXED} --micro-batch 4 --global-batch 32",
        "fsdp2",
    ),
    Layout("chunked loss", "2xh200", "short", f"--zero 2 --loss chunked {MIXED} --micro-batch 8", "fsdp2"),
    Layout("LoRA", "1xh200", "short", f"--zero 0 --lora 16 {MIXED} --micro-batch 8"),
    Layout("LoRA, ZeRO-3", "2xh200", "short", f"--zero 3 --lora 16 {MIXED} --micro-batch 8", "fsdp2"),
    Layout("LoRA, full", "2xh200", "short", f"--zero 3 --lora 16 --checkpoint full {MIXED} --micro-batch 8", "fsdp2"),
    Layout("host optimizer", "1xh200", "short", f"--zero 0 --offload optimizer {MIXED} --micro-batch 2"),
    Layout(
        "host activations", "1xh200", "short", f"--zero 0 --offload activations --loss chunked {PURE} --micro-batch 8"
    ),
    Layout(
        "host states", "2xh200", "short", f"--zero 3 --offload optimizer,parameters {MIXED} --micro-batch 2", "fsdp2"
    ),
    Layout(
        "host inputs",
        "2xh200",
        "short",
        f"--zero 3 --offload activations --checkpoint full --loss chunked {MIXED} --micro-batch 4",
        "fsdp2",
    ),
    Layout(
        "host all",
        "2xh200",
        "short",
        f"--zero 3 --offload all --checkpoint full --loss chunked {MIXED} --micro-batch 4",
        "fsdp2",
    ),
)


def main() -> None:
    """Run what was named, or all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layouts", nargs="*", help=", ".join(layout.name for layout in LAYOUTS))
    parser.add_argument("--zero", action="store_true", help="ZeRO's published table, too")
    parser.add_argument("--plan-only", action="store_true", help="keep the runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    kept: dict[str, Row] = json.loads(options.results.read_text()) if options.results.exists() else {}
    for layout in LAYOUTS:
        if not options.layouts or layout.name in options.layouts:
            kept |= compare(layout, kept if options.plan_only else {}) | {"made": versions()}
            options.results.write_text(json.dumps(kept, indent=1) + "\n")
    if options.zero:
        kept["ZeRO"] = zero_table()
        options.results.write_text(json.dumps(kept, indent=1) + "\n")
    show(kept)


def versions() -> dict[str, str]:
    """What the figures were last made with."""
    asked = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    return {"commit": commit} | {name: version(name) for name in ("torch", "transformers", "peft")}


# -- layouts


def compare(layout: Layout, kept: dict[str, Row]) -> dict[str, Row]:
    """Both sides of one layout, by name: of a pipeline, of its first and its last stage."""
    planned, names = plan(layout), names_of(layout)
    runs = {end: kept[name]["run"] for end, name in names.items()} if kept else run(layout)
    return {
        name: {"request": request(layout), "plan": figures(layout, planned, end), "run": runs[end]}
        for end, name in names.items()
    }


def names_of(layout: Layout) -> dict[End, str]:
    """Of its rows."""
    return {end: layout.name if end == "worst" else f"{layout.name}, {end} stage" for end in layout.ends}


def request(layout: Layout) -> str:
    """What is asked of the planner, less what is the same for all."""
    return f"{layout.model}.json --gpus {layout.gpus} --framework {layout.framework} {layout.words}"


def plan(layout: Layout) -> dict[str, Any]:
    """What the planner chooses where nothing is left to choose."""
    fixed = [word for flag, value in FIXED.items() if flag not in layout.flags for word in (flag, value)]
    words = [*layout.flags, *fixed, "--framework", layout.framework]
    return answer("plan", "train", str(model_of(layout)), "--gpus", layout.gpus, *words)


def run(layout: Layout) -> dict[End, dict[str, Any]]:
    """The script on the virtual cluster: what the ranks at the ends hold, or the one that allocates most."""
    script = (str(SCRIPTS / "train.py"), "--model", str(model_of(layout)), *layout.flags)
    ranks = answer("run", "--gpus", layout.gpus, script=script)["ranks"]
    most = max(ranks, key=lambda rank: int(rank["peak_allocated_bytes"]))
    by_end: dict[End, Any] = {"first": ranks[0], "last": ranks[-1], "worst": most}
    return {end: {key: rank[key] for key in (*PEAKS, "ledger", "engine_bytes")} for end, rank in by_end.items()}


def model_of(layout: Layout) -> Path:
    """Its config."""
    return SCRIPTS / f"{layout.model}.json"


def answer(*words: str, script: tuple[str, ...] = ()) -> dict[str, Any]:
    """A command's JSON."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "answer.json"
        done = subprocess.run([str(TONNAGE), *words, "--json", str(target), *script], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
        said: dict[str, Any] = json.loads(target.read_text())
        return said


def figures(layout: Layout, planned: dict[str, Any], end: End) -> dict[str, Any]:
    """The plan's peaks and ledger, of one end of a pipeline where that is asked for."""
    names = {field.name for field in fields(Configuration)} - {"objective"}
    chosen = {name: value for name, value in planned["best"]["config"].items() if name in names}
    chosen["lora_targets"] = tuple(chosen["lora_targets"])  # JSON knows lists alone
    budget = training_budget(find_model(str(model_of(layout))), Configuration(**chosen), find_gpu("h200"), stage=end)
    sizes = [
        round(float(size)) for size in (budget.peak_allocated_bytes, budget.peak_reserved_bytes, budget.total_bytes)
    ]
    terms = {f"{term.category}: {term.name}": round(float(term.size_bytes)) for term in budget.terms_at(0)}
    return dict(zip(PEAKS, sizes, strict=True)) | {
        "ledger": ledger_figures(budget.ledger_at(0), sizes[-1]),
        "moment": budget.moment_at(0),
        "terms": terms,
        "config": chosen,
    }


def difference(row: Row, peak: str) -> float:
    """Of the plan, as a share of the run."""
    return float(row["plan"][peak] / row["run"][peak] - 1)


# -- ZeRO's table


STATES = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATES)
PUBLISHED_GB = (120.0, 31.4, 16.6, 1.9)


def zero_table() -> Row:
    """Model states by stage: published, planned, and alive on the virtual cluster."""
    found = {}
    for stage, published in enumerate(PUBLISHED_GB):
        with tempfile.TemporaryDirectory() as folder:
            kept = Path(folder) / "run.tonnage"
            words = ("--model", str(SCRIPTS / "zero.json"), "--stage", str(stage))
            answer("run", "--gpus", "8x8xh200", "-o", str(kept), script=(str(SCRIPTS / "zero.py"), *words))
            ran = states_alive(open_recording(kept), stage)
        found[str(stage)] = {"published_gb": published, "plan_bytes": planned_states(stage), "run_bytes": ran}
    return found


def planned_states(stage: int) -> int:
    """As `tonnage plan train --framework deepspeed` counts them, less what is gathered or on its way."""
    configuration = Configuration(framework="deepspeed", zero=stage, data=64, shard=64, seq=128, checkpoint="full")
    terms = training_budget(find_model(str(SCRIPTS / "zero.json")), configuration, find_gpu("h200")).terms
    states = ("parameters", "gradients", "FP32 master copies", "adamw states")
    return round(sum(float(term.size_bytes) for term in terms if term.category in STATES and term.name in states))


def states_alive(recording: Recording, stage: int) -> int:
    """As the optimizer's last step begins. Stage 2 lets go of whole parameters then: they count as backward begins."""
    steps = {mark.name: mark.sequence for mark in recording.marks if mark.kind == "phase"}
    before = dict.fromkeys(STATES, steps["optimizer"])
    if stage == 2:
        before[Category.PARAMETERS] = steps["backward"]
    return sum(
        block.block_bytes
        for block in recording.allocations
        if block.category in STATES
        and block.born < before[block.category] <= (block.died if block.died is not None else sys.maxsize)
    )


# -- the tables


def show(kept: dict[str, Row]) -> None:
    """GiB of plan and run side by side: peaks, then the ledgers of what is allocated."""
    rows = {name: kept[name] for layout in LAYOUTS for name in names_of(layout).values() if name in kept}
    print(f"{'':28}{'allocated: plan, run':^27}  {'process: plan, run':^27}".rstrip())
    for name, row in rows.items():
        cells = (_cells(row, peak) for peak in ("peak_allocated_bytes", "peak_process_bytes"))
        print(f"{name:28}{'  '.join(cells)}")
    print(f"\n{'':28}" + "".join(f"{title:>14}" for title in ("parameters", "gradients", "optimizer", "the rest")))
    for name, row in rows.items():
        print(f"{name:28}" + "".join(f"{planned:7.2f}{ran:7.2f}" for planned, ran in zip(*_parts(row), strict=True)))
    print()
    for stage, found in kept.get("ZeRO", {}).items():
        planned, ran = found["plan_bytes"] / 1e9, found["run_bytes"] / 1e9
        print(f"ZeRO stage {stage}: published {found['published_gb']} GB, plan {planned:.2f}, run {ran:.2f}")


def _parts(row: Row) -> tuple[list[float], list[float]]:
    """Of both sides in GiB: by what belongs to parameters, and all else that is allocated."""
    planned, ran = row["plan"]["ledger"], row["run"]["ledger"]
    sides = []
    for ledger, names, peak in (
        (planned, ("parameters_bytes", "gradients_bytes", "optimizer_bytes"), row["plan"]["peak_allocated_bytes"]),
        (ran, ("parameters", "gradients", "optimizer_states"), row["run"]["peak_allocated_bytes"]),
    ):
        found = [ledger.get(name, 0) for name in names]
        sides.append([size / GIB for size in (*found, peak - sum(found))])
    return sides[0], sides[1]


def _cells(row: Row, peak: str) -> str:
    planned, ran = row["plan"][peak] / GIB, row["run"][peak] / GIB
    return f"{planned:8.2f} {ran:8.2f} GiB {difference(row, peak):+6.1%}"


if __name__ == "__main__":
    main()
