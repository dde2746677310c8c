"""xMem's experiments (Middleware 2025): image and language models trained on an RTX 3060, an RTX 4060 and CoLab's A100.

`ground` is the peak of what NVML says the card holds, sampled every millisecond, less its first sample. Their runner
limits the process's share of memory before that, which makes the CUDA context: the context is not in the figure, what
torch and its libraries load later is. A run that ran out has no figure, only a verdict.
"""

import csv
from collections import Counter
from functools import cache, partial
from itertools import product
from pathlib import Path

import running
from rows import Prediction, Reading, Row, Source

from tonnage.hardware import find_cuda_gpu
from tonnage.virtual.kernels.convolution_engines import Convolution, ConvolutionCall, workspace_bytes

HERE = Path(__file__).parents[1]
FIGURES = HERE / "figures" / "xmem.csv"
RIVALS = {"xmem": "xMem", "dnnmem": "DNNMem", "schedtune": "SchedTune", "llmem": "LLMem"}
MIB = 1 << 20
# What every run imports, so that each fork has it: Dynamo, which torchvision brings, wakes Inductor when a run begins.
MODELS = ("gpt_neo", "gpt2", "opt", "t5", "llama", "qwen2", "qwen3", "gemma2")
LIBRARIES = (
    "torchvision_names", "torchvision", "torch._inductor.cudagraph_trees", "transformers", "transformers.optimization",
    *(f"transformers.models.{name}.modeling_{name}" for name in MODELS),
)  # fmt: skip


def read() -> Reading:
    """Every run that was read: NVML counts whole pages of 2 MiB."""
    with FIGURES.open() as file:
        return Reading([row_of(fields) for fields in csv.DictReader(file)], Counter())


def row_of(fields: dict[str, str]) -> Row:
    """A run with what each estimator said of it."""
    ran_out = fields["ran_out"] == "1"
    words = fields["model"], fields["optimiser"], fields["batch"]
    return Row(
        name="/".join((fields["folder"], *words, fields["card"], fields["run"])),
        card=fields["card"],
        torch="2.6",
        case={"words": words, "said_out": fields["said_out"].split("+")},
        meter="process",
        measured=None if ran_out else int(fields["ground_bytes"]),
        resolution=MIB,
        fits=not ran_out,
        rivals={name: int(size) for key, name in RIVALS.items() if (size := fields[f"{key}_bytes"])},
    )


@cache
def prepare() -> None:
    """Load once what every fork needs: the libraries, and the tables of cuDNN's workspaces."""
    running.preload(*LIBRARIES)
    layer = Convolution((5, 9, 9), (7, 5, 3, 3), (1, 1), (1, 1), (1, 1), 1)
    for way, last in product(("forward", "backward_data", "backward_filter"), (False, True)):
        workspace_bytes(ConvolutionCall(way, layer, 3, "float32", last))


def predict(row: Row) -> Prediction:
    """The process of the same steps on the virtual card, less the context."""
    prepare()
    peaks = running.run(HERE / "scripts" / "xmem_train.py", row.case["words"], row.card, row.torch)
    if peaks.outcome == "error":
        return Prediction(refused=peaks.error.splitlines()[-1] if peaks.error else "failed", seconds=peaks.seconds)
    context = find_cuda_gpu(row.card).overheads["context"].size_bytes
    return Prediction(peaks.process - context, peaks.outcome == "ok", seconds=peaks.seconds)


def published(key: str, row: Row) -> Prediction:
    """What an estimator said of a run, whether it would fit among it."""
    size = row.rivals.get(RIVALS[key])
    return Prediction(size, None if size is None else key not in row.case["said_out"])


SOURCE = Source(
    key="xmem",
    title="xMem's experiments",
    where="github.com/Stone-ResearchLife/xMem plot/data at d61e0764486838fff7a444bb03be7d6d2cd8bbaa (005: 7114ee6d)",
    read=read,
    predict=predict,
    rivals={name: partial(published, key) for key, name in RIVALS.items()},
)
