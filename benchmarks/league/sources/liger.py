"""Liger-Kernel's own benchmarks: memory of what its kernels replace, one kernel at a time, and of the kernels (`liger_kernels`).

The latter are run with the CUDA build of torch, where liger-kernel is.
"""

import csv
import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path

import running
from rows import Prediction, Reading, Row, Source

HERE = Path(__file__).parent.parent
FIGURES = HERE / "figures" / "liger.csv"
SCRIPT = HERE / "scripts" / "liger" / "measure.py"
MIB = 2**20

CARDS = {
    "NVIDIA A100-SXM4-80GB": "a100-80", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H100 PCIe": "h100-pcie", "NVIDIA B200": "b200",
    "NVIDIA GeForce RTX 3090": "rtx-3090", "NVIDIA GeForce RTX 4090": "rtx-4090",
}  # fmt: skip
# Kernels of Liger whose buffers were others in the version that was measured: the installed one cannot stand for it.
CHANGED = {
    ("rms_norm", "0.2.1"), ("layer_norm", "0.6.0"), ("fused_linear_cross_entropy", "0.4.2"), ("fused_linear_jsd", "0.3.1"),
}  # fmt: skip
# Nobody says which torch it was: the newest of the day is taken, and the installed one after the last of these.
RELEASES = {
    "2024-07-24": "2.4", "2024-10-17": "2.5", "2025-01-29": "2.6", "2025-04-23": "2.7", "2025-08-06": "2.8", "2025-10-15": "2.9",
    "2026-05-01": "",
}  # fmt: skip
# These were still measured with the first scripts, whatever table they are in.
FIRST_SCRIPTS = ("multi_token_attention", "tiled_geglu", "tiled_swiglu")


def read(own: bool = False) -> Reading:
    """Every memory row of the three tables that is of plain PyTorch, or of Liger's own kernels."""
    rows, left_out = [], Counter[str]()
    for figures in csv.DictReader(FIGURES.open()):
        kernel, provider = figures["kernel"], figures["provider"]
        if own != provider.startswith(("liger", "cutile", "cutedsl")):
            continue
        if "cutile" in provider or "cutedsl" in provider:
            left_out["kernels of cuTile and CuTe DSL, which are not here"] += 1
        elif provider.startswith("megatron") and kernel != "megatron_rms_norm":
            left_out["Megatron's own fused kernels, which are not here"] += 1
        elif provider == "liger" and (kernel, figures["version"]) in CHANGED:
            left_out["kernels of Liger that were rewritten since"] += 1
        else:
            rows.append(row_of(figures))
    return Reading(rows, left_out)


def row_of(figures: dict[str, str]) -> Row:
    kernel, x, config = figures["kernel"], figures["x"], json.loads(figures["config"])
    late = (figures["table"] != "main" or "vocab_size" in config) and kernel not in FIRST_SCRIPTS
    mode = "full" if kernel == "group_norm" else figures["mode"]  # whose script asks for no mode
    case = {
        "kernel": kernel, "provider": figures["provider"].replace("liger_triton", "liger"), "mode": mode,
        "x": int(x) if x.isdigit() else x, "config": config, "late": late,
    }  # fmt: skip
    # They were kept as 32-bit floats.
    measured = float(figures["mib"])
    words = (figures["table"], kernel, figures["provider"], figures["mode"], figures["x_name"], x, figures["sweep"])
    card = CARDS[figures["card"]]
    torch = [version for day, version in RELEASES.items() if day <= figures["date"]][-1]
    return Row(
        "/".join((*words, card)), card, torch, case, "allocated", round(measured * MIB), round(measured * 2**-24 * MIB)
    )


@cache
def by_benchmark() -> Mapping[tuple[str, ...], Sequence[Row]]:
    """The rows of each run of a publisher's script, in their order."""
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in (*read().rows, *read(own=True).rows):
        groups[benchmark_of(row)].append(row)
    return groups


def benchmark_of(row: Row) -> tuple[str, ...]:
    table, kernel, *_ = row.name.split("/")
    return table, kernel, row.card, *(["own"] if is_own(row) else [])


def is_own(row: Row) -> bool:
    return str(row.case["provider"]).startswith("liger")


def predict(row: Row) -> Prediction:
    """What the same rounds take on the virtual card."""
    return predicted_together(benchmark_of(row))[row.name]


@cache
def predicted_together(benchmark: tuple[str, ...]) -> Mapping[str, Prediction]:
    return predictions(by_benchmark()[benchmark])


def predictions(rows: Sequence[Row]) -> Mapping[str, Prediction]:
    """What is said of rows of one benchmark, which one process measures. A CUDA build is what it is, of any torch."""
    if is_own(rows[0]) and find_spec("liger_kernel") is None:
        return dict.fromkeys(
            (row.name for row in rows), Prediction(refused="needs liger-kernel and a CUDA build of torch")
        )
    # Liger and the models of transformers ask for the device when they are imported, so that comes after the fork.
    running.preload("transformers", *(["triton"] if is_own(rows[0]) else []))
    with tempfile.TemporaryDirectory() as folder:
        given, answers = Path(folder, "cases.json"), Path(folder, "answers.json")
        given.write_text(json.dumps([row.case for row in rows]))
        peaks = running.run(SCRIPT, [str(given), str(answers)], rows[0].card, rows[0].torch or None, timeout_s=900)
        said = json.loads(answers.read_text()) if answers.exists() else []
    found: dict[str, Prediction] = {}
    for row, answer in zip_longest(rows, said, fillvalue=peaks.error or peaks.outcome):
        refused = {"refused": answer} if isinstance(answer, str) else {"predicted": answer}
        found[row.name] = Prediction(**refused, seconds=peaks.seconds / len(rows))
    return found


WHERE = "github.com/linkedin/Liger-Kernel, benchmark/data/all_benchmark_data*.csv at ead96b61"
SOURCE = Source("liger", "Liger-Kernel's benchmarks: what it replaces", WHERE, read, predict)
