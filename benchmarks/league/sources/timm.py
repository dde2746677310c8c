"""timm's own benchmarks: the largest batch of a series that a card held, for hundreds of models.

The publisher's script tries a batch, and after an error the next one of a series (1024, 768, 512, 384, ...). So a published
line is a verdict: its batch fitted, and where it is not the first of the series, the one before it did not.

    cd benchmarks/league && python -m sources.timm REPOSITORY     draws the lines anew from a git directory of timm
"""

import csv
import io
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rows import Prediction, Reading, Row, Source

HERE = Path(__file__).parents[1]

FIGURES = HERE / "figures" / "timm.csv"
FILES = HERE / "figures" / "timm-files.csv"
SCRIPT = HERE / "scripts" / "timm_step.py"
COMMIT = "aa4b5850"
CARDS = {
    "rtx3090": "rtx-3090",
    "rtx4090": "rtx-4090",
    "4090": "rtx-4090",
    "5090": "rtx-5090",
    "pro6000maxq": "rtx-pro-6000-max-q",
}
BACKED_OFF, AT_ONCE = 20, 6  # lines of each file that are drawn: those that backed off say the most
NEWEST = "benchmark-infer-amp-nchw-pt291-cu128-4090.csv"  # what timm had last: 1.0.24, of January 2026
Line = tuple[str, int, int, str]  # model, batch, image, millions of parameters
COLUMNS = ("file", "model", "batch", "image")


@dataclass(frozen=True)
class File:
    """One of the publisher's tables: where and how its models ran, and how many lines of it are of no use here."""

    name: str
    lines: int
    asked: int  # the first batch of the series
    backed_off: int
    compiled: int
    changed: int  # of models that are gone from timm since, or have other parameters

    @property
    def parts(self) -> dict[str, str]:
        """What its name says."""
        found = re.match(
            r"benchmark-(?P<way>infer|train)-\w+-(?P<layout>nchw|nhwc)-pt(?P<torch>\d+)-cu\d+-(?P<card>\w+)", self.name
        )  # fmt: skip
        assert found, self.name
        return found.groupdict()

    @property
    def torch(self) -> str:
        """ "pt113" is 1.13, "pt240" is 2.4."""
        digits = self.parts["torch"]
        return f"1.{digits[1:]}" if digits[0] == "1" else f"{digits[0]}.{digits[1]}"


def series(asked: int) -> list[int]:
    """Batches in the order in which they are tried: powers of two, and the middle between each two."""
    batches, power = [asked], asked
    while power > 1:
        power //= 2
        batches += [power + power // 2, power] if power > 1 else [power]
    return batches


def read() -> Reading:
    """The lines that were drawn, each as one verdict or two."""
    with FILES.open() as text:
        files = {
            row["name"]: File(row["name"], *(int(row[key]) for key in list(row)[1:])) for row in csv.DictReader(text)
        }
    with FIGURES.open() as text:
        lines = list(csv.DictReader(text))
    rows = [
        row
        for line in lines
        for row in verdicts(files[line["file"]], line["model"], int(line["batch"]), int(line["image"]))
    ]
    left_out = Counter[str]()
    for file in files.values():
        drawn = sum(line["file"] == file.name for line in lines)
        left_out["torch.compile, which is not modelled with these versions"] += file.compiled
        left_out["a model that is gone from timm since, or has other parameters"] += file.changed
        left_out["not drawn"] += file.lines - file.compiled - file.changed - drawn
    return Reading(rows, +left_out)


def verdicts(file: File, model: str, batch: int, image: int) -> Iterator[Row]:
    """What one published line says: this batch fits, and the one that was tried before it does not."""
    parts, tried = file.parts, series(file.asked)
    case = {"model": model, "image": image, "way": parts["way"], "layout": parts["layout"]}
    for size, fits in [(batch, True), *((larger, False) for larger in tried[: tried.index(batch)][-1:])]:
        name = f"{file.name.removeprefix('benchmark-').removesuffix('.csv')} {model} {image} {size}"
        yield Row(name, CARDS[parts["card"]], file.torch, case | {"batch": size}, meter="process", fits=fits)


def words(row: Row) -> list[str]:
    """The command line of the step that stands for the publisher's."""
    case, version = row.case, tuple(int(part) for part in row.torch.split("."))
    found = [case["model"], "--batch", str(case["batch"]), "--image", str(case["image"])]
    found += ["--train"] * (case["way"] == "train") + ["--channels-last"] * (case["layout"] == "nhwc")
    # Fused attention came to timm with torch 2.0, the inference mode to its benchmark in July 2025.
    return found + ["--plain-attention", "--before-2"] * (version < (2, 0)) + ["--no-grad"] * (version < (2, 8))


# The publisher's script goes on with a smaller batch after any error of PyTorch, not only where memory runs out.
REFUSALS = ("canUse32BitIndexMath", "invalid configuration argument")
_loaded: list[str] = []


def load() -> None:
    """Load the libraries once, and cuDNN's measured plans, for all forks."""
    if _loaded:
        return
    from running import preload

    preload("torchvision_names", "timm", "timm.optim", "torch._inductor.cudagraph_trees")
    from tonnage.virtual.kernels.convolution_engines import Convolution, ConvolutionCall, workspace_bytes

    layer = Convolution((3, 97, 97), (17, 3, 5, 5), (1, 1), (1, 1), (1, 1), 1)
    for way in ("forward", "backward_data", "backward_filter"):
        for channels_last in (True, False):
            workspace_bytes(ConvolutionCall(way, layer, 3, "float16", channels_last))  # type: ignore[arg-type]
    _loaded.append("timm")


def predict(row: Row) -> Prediction:
    """Run the step on the card of the row."""
    load()
    from running import run

    peaks = run(SCRIPT, words(row), row.card, row.torch)
    if peaks.outcome == "error" and any(refusal in peaks.error for refusal in REFUSALS):
        return Prediction(fits=False, seconds=peaks.seconds)
    if peaks.outcome == "error":
        return Prediction(refused=peaks.error.strip().rpartition("\n")[2][:200], seconds=peaks.seconds)
    return Prediction(predicted=peaks.process, fits=peaks.outcome == "ok", seconds=peaks.seconds)


# Drawing


def draw(repository: Path) -> None:
    """Draw lines of every table of a git directory, and write them and the counts."""
    names = _git(repository, "ls-tree", "--name-only", f"{COMMIT}:results").split()
    files, drawn = [], []
    newest = {row["model"]: row["param_count"] for row in _table(repository, NEWEST)}
    for name in sorted(name for name in names if name.startswith("benchmark-") and "-cpu-" not in name):
        table = _table(repository, name)
        way = name.split("-")[1]
        lines = [
            (row["model"], int(float(row[f"{way}_batch_size"])), int(row[f"{way}_img_size"]), row["param_count"])
            for row in table
            if row[f"{way}_batch_size"]
        ]
        asked = max(batch for _, batch, *_ in lines)
        same = [line for line in lines if newest.get(line[0]) == line[3]]
        compiled = len(table) if "dynamo" in name else 0
        changed = 0 if compiled else len(table) - len(same)
        found = [] if compiled else _draw(name, same, asked)
        files.append((name, len(table), asked, sum(batch < asked for _, batch, *_ in lines), compiled, changed))
        drawn += [(name, *line[:3]) for line in found]
        print(name, len(found), changed, file=sys.stderr, flush=True)
    for path, heads, rows in (
        (FILES, ("name", "lines", "asked", "backed_off", "compiled", "changed"), files), (FIGURES, COLUMNS, drawn),
    ):  # fmt: skip
        with path.open("w", newline="") as text:
            csv.writer(text, lineterminator="\n").writerows([heads, *rows])


def _draw(name: str, lines: list[Line], asked: int) -> list[Line]:
    """So many lines that backed off, and so many that did not."""
    drawing = random.Random(f"20 {name}")
    return [
        line
        for backed_off, count in ((True, BACKED_OFF), (False, AT_ONCE))
        for line in drawing.sample([line for line in lines if (line[1] < asked) == backed_off], count)
    ]


def _table(repository: Path, name: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(_git(repository, "show", f"{COMMIT}:results/{name}"))))


def _git(repository: Path, *command: str) -> str:
    return subprocess.run(["git", "-C", str(repository), *command], check=True, capture_output=True, text=True).stdout


SOURCE = Source(
    "timm", "timm's benchmarks", f"huggingface/pytorch-image-models results/benchmark-*.csv at {COMMIT}", read, predict
)

if __name__ == "__main__":
    draw(Path(sys.argv[1]))
