"""GPUMemNet's data: trainings on an A100 of 40 GB, its memory read with nvidia-smi once a second.

- `mlp1`, `mlp2`: random perceptrons (benchmarks/league/scripts/random_mlp.py).
- `timm`: models of timm, trained by its train.py with the defaults, beside an estimate with fake tensors.
- `imagenet`: six image classifiers under Adam, beside GPUMemNet's own estimate, fake tensors' and the formula of Horus.

The reading has in it what the driver, its modules and the monitors hold on that machine, which its owner alone can know. A user
has it from one small run; here the publisher's own smallest training of each kind (the rows `fixed`) is that run, and is not
judged. The second predictor does without.

A reading once a second misses what lasts for moments, so the allocator is read after the last step, when the search for cuDNN's
engines (`cudnn.benchmark`) has given its workspaces back.
"""

import csv
import runpy
import sys
import tempfile
from collections import Counter
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path

from rows import Prediction, Reading, Row, Source
from running import FORKS, Peaks, preload, run

from tonnage.virtual import virtual_gpu

HERE = Path(__file__).parents[1]
FIGURES = HERE / "figures" / "gpumemnet.csv"
SCRIPTS = HERE / "scripts"
CARD = "a100-40"
MIB = 1 << 20
CARD_MIB = 40_536  # what a program can have of it
FULL_MIB = 39_000  # a reading this high: the run has met the end of the card, or nearly
PUBLISHED = 3000 + 3000 + 5085 + 18  # the four sets
NEVER = {
    "perceptrons beside the formula of Horus: TensorFlow, whose allocator doubles": 536,
    "the paper's transformers: their training script is not published": 6,
}
LOADED_BY_RUNS = (
    "timm", "timm.optim", "timm.loss", "torchvision.models", "torch._inductor.cudagraph_trees", "torch._inductor.compile_fx",
    "tonnage.virtual.cluster.distributed", "tonnage.virtual.compiling", "tonnage.virtual.cuda.devices",
)  # fmt: skip


def figures() -> list[dict[str, str]]:
    """The kept lines, numbered."""
    with FIGURES.open() as lines:
        return [line | {"number": str(number)} for number, line in enumerate(csv.DictReader(lines))]


def read() -> Reading:
    """The sample, without the rows whose reading says nothing of what was asked for."""
    left_out = Counter(NEVER)
    rows = []
    for line in figures():
        measured, half = int(line["measured_mib"]), int(line["half_batch_mib"] or 0)
        if line["set"] == "fixed":
            left_out["the machine's fixed part is read from it"] += 1
        elif measured >= FULL_MIB:
            left_out["ran to the end of the card"] += 1
        elif half / 2 < measured < half < FULL_MIB:
            left_out["reads less than the half batch, which was read in its search or is all that ran"] += 1
        else:
            rows.append(as_row(line, died=measured < half))
    left_out["not in the seeded sample"] = PUBLISHED - sum(line["set"] != "fixed" for line in figures())
    return Reading(rows, left_out)


def as_row(line: dict[str, str], died: bool) -> Row:
    """A published training. One that read less than half of the half batch, or than a full card, died: that is all it says."""
    measured = int(line["measured_mib"])
    return Row(
        name=f"{line['number']} {line['set']} {line['model'] or line['shape']} {line['batch']}",
        card=CARD, torch="", case=line, meter="process", measured=None if died else measured * MIB, resolution=MIB,
        fits=not died if line["set"] == "timm" else None,
        rivals={name: mib(line[f"{name}_mib"]) for name in ("gpumemnet", "horus") if line[f"{name}_mib"]},
    )  # fmt: skip


def mib(figure: str) -> int:
    return round(float(figure) * MIB)


def predict(row: Row) -> Prediction:
    """What the allocator holds, and the machine's fixed part."""
    return said(row, fixed_bytes("mlp" if row.case["set"].startswith("mlp") else "timm"))


def predict_unmeasured(row: Row) -> Prediction:
    """The same with the catalogue's figures for the context and the libraries, which are those of another card."""
    return said(row, None)


def said(row: Row, fixed: int | None) -> Prediction:
    """The verdict is that of the run on the card; bytes are of a card without a limit."""
    peaks, held = trained(*words(row.case))
    if peaks.outcome == "error" and not held:
        return Prediction(refused=peaks.error, seconds=peaks.seconds)
    beside = peaks.process - peaks.reserved if fixed is None else fixed
    fits = peaks.outcome == "ok" if row.fits is not None else None
    return Prediction(held + beside, fits=fits, seconds=peaks.seconds)


def faketensor(row: Row) -> Prediction:
    """The published estimate, which is of tensors alone."""
    if not row.case["faketensor_mib"]:
        return Prediction()
    estimate = mib(row.case["faketensor_mib"])
    fits = estimate <= CARD_MIB * MIB if row.fits is not None else None
    return Prediction(estimate if row.measured else None, fits=fits)


@cache
def fixed_bytes(kind: str) -> int:
    """What the machine's reading has beside the allocator: of the smallest training of the kind."""
    line = next(line for line in figures() if line["set"] == "fixed" and (kind == "timm") == bool(line["model"]))
    return int(line["measured_mib"]) * MIB - trained(*words(line))[1]


def words(line: dict[str, str]) -> tuple[str, ...]:
    """A script and its arguments."""
    if line["model"]:
        return "imagenet_adam.py" if line["set"] == "imagenet" else "timm_train.py", line["model"], line["batch"]
    numbers = [word for name in ("inputs", "outputs", "depth", "batch", "shape") for word in (f"--{name}", line[name])]
    switches = [f"--{name}" for name in ("dropout", "norm") if line[name] == "1"]
    return "random_mlp.py", *numbers, *(["--activation", line["activation"]] if line["activation"] else []), *switches


@cache
def trained(script: str, *arguments: str) -> tuple[Peaks, int]:
    """The virtual run, and what its allocator held where the publisher's monitor would see it."""
    if script == "random_mlp.py":
        pipe = perceptrons()
        pipe.send([script, *arguments])
        return (peaks := pipe.recv()), peaks.reserved
    load()
    with tempfile.TemporaryDirectory() as folder:
        reading = Path(folder) / "held"
        peaks = run(SCRIPTS / script, [*arguments, str(reading)], CARD)
        return peaks, int(reading.read_text()) if reading.exists() else peaks.reserved


@cache
def load() -> None:
    """Import what every run would import, once."""
    import torchvision_names  # noqa: F401 - lets timm import a torchvision that was built for CUDA

    preload(*LOADED_BY_RUNS)


@cache
def perceptrons() -> Connection:
    """A process that trains one after the other, as each takes a tenth of a second: words go in, peaks come out."""
    preload()
    ours, theirs = FORKS.Pipe()
    FORKS.Process(target=train_perceptrons, args=(theirs,), daemon=True).start()
    return ours


def train_perceptrons(pipe: Connection) -> None:
    main = runpy.run_path(str(SCRIPTS / "random_mlp.py"))["main"]
    while True:
        sys.argv = pipe.recv()
        error = ""
        with virtual_gpu(CARD) as gpu:
            try:
                main()
            except ValueError as problem:
                # The first set's labels do not fit one output: the publisher's runs ended there too.
                error = str(problem)
            held, recording = gpu.peak_reserved_bytes, gpu.recording
        outcome = "error" if error else "ok"
        pipe.send(Peaks(outcome, gpu.peak_allocated_bytes, held, recording.peak_process_bytes, error))


SOURCE = Source(
    key="gpumemnet",
    title="GPUMemNet: perceptrons, timm's train.py and image classifiers on an A100 of 40 GB",
    where=(
        "itu-rad/GPUMemNet f01eb05: Datasets/MLP, Related_works/FakeTensor/fake_tensor.xlsx, "
        "Test_Pipeline/GPUMemNet_CNN.xlsx, Results_plotter_for_paper/data.csv"
    ),
    read=read,
    predict=predict,
    rivals={"faketensor": faketensor, "tonnage, card unmeasured": predict_unmeasured},
)
