"""PEFT's comparison of methods: fine-tunings of one language model and of one image model, each with another adapter.

The samples of MetaMathQA are not here. What is published of them: how many tokens all steps had, and the cap of a sample. So
their lengths are taken to be gamma distributed with that mean, one sample of all being as long as the cap. As the publisher
does, they are put in buckets of 80 and sorted, longest first. Three batches of those stand for all: one of mean length, whose
end of step is the mean end of step (a straight line in the length); the shortest of a bucket, whose outputs are still there
when the next bucket begins; and the longest of all, which decides the peak.
"""

import importlib.util
import json
import math
import random
import struct
import sys
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import running
from rows import Prediction, Reading, Row, Source

from tonnage.models.presets import preset_config

LEAGUE = Path(__file__).parents[1]
COMMON = {"optimizer_type": "AdamW", "grad_norm_clip": 1.0, "autocast_adapter_dtype": True}
DEFAULTS = {
    "MetaMathQA": COMMON | {"optimizer_kwargs": {"lr": 1e-4, "weight_decay": 0.1}},
    "image-gen": COMMON | {"optimizer_kwargs": {"lr": 1e-4, "weight_decay": 1e-4}},
}
SCRIPTS = {"MetaMathQA": "peft_metamath.py", "image-gen": "peft_images.py"}
MODEL = "llama-3.2-3b"
BATCH, BUCKET, LONGEST = 4, 80, 768
METERS = {"reserved": "reserved_max", "allocated": "allocated_avg"}


def read() -> Reading:
    rows, left_out = [], Counter[str]()
    for line in (LEAGUE / "figures" / "peft.jsonl").read_text("utf-8").splitlines():
        case = json.loads(line)
        reason = _reason(case)
        if reason:
            left_out[reason] += len(METERS)
            continue
        for meter, figure in METERS.items():
            name, fits = f"{case['task']}/{case['experiment']} {meter}", True if meter == "reserved" else None
            rows.append(Row(name, "l40s", case["torch"][:4], case, meter, case[figure], fits=fits))
    return Reading(rows, left_out)


def _reason(case: dict[str, Any]) -> str:
    if case["task"] == "image-gen" and _diffusers() is None:
        return "diffusers is not installed"
    if case["training"].get("init_kv_cache_prefix"):
        return "an adapter that starts from a text, whose tokenizer is not here"
    return ""


def predict(row: Row) -> Prediction:
    found = _readings(json.dumps(row.case))
    if found["error"]:
        return Prediction(refused=found["error"], seconds=found["seconds"])
    if row.meter == "allocated":
        return Prediction(found["allocated"][0], seconds=found["seconds"])
    return Prediction(found["reserved_max"], found["outcome"] == "ok", seconds=found["seconds"])


@cache
def _readings(line: str) -> dict[str, Any]:
    """What the script reads of a run, which both of its rows share."""
    case = json.loads(line)
    model = _folder()
    settings = DEFAULTS[case["task"]] | case["training"] | {"model": str(model), "adapter": case["adapter"]}
    if case["task"] == "MetaMathQA":
        mean, shortest = _lengths(case["tokens"], case["steps"])
        settings["lengths"] = [[mean, shortest], [LONGEST]]
    script = LEAGUE / "scripts" / SCRIPTS[case["task"]]
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "settings.json"), Path(folder, "readings.json")
        asked.write_text(json.dumps(settings), "utf-8")
        ran = running.run(script, [str(asked), str(answered)], "l40s", case["torch"][:4], timeout_s=1800)
        if not answered.exists():
            return {"error": ran.error or "the script wrote nothing", "seconds": ran.seconds}
        return json.loads(answered.read_text()) | {"error": "", "outcome": ran.outcome, "seconds": ran.seconds}


@cache
def _lengths(tokens: int, steps: int) -> tuple[int, int]:
    """To how many tokens batches are padded in the mean, and the shortest batches of buckets."""
    samples, draw = steps * BATCH, random.Random(0)
    mean = tokens / samples - 1  # a token that is counted and not in the batch
    shape = _shape(mean, 1 / samples)
    padded, shortest = [], []
    for _ in range(samples // BUCKET):
        bucket = sorted((min(LONGEST, draw.gammavariate(shape, mean / shape)) for _ in range(BUCKET)), reverse=True)
        padded += bucket[::BATCH]
        shortest.append(bucket[-BATCH])
    return round(fmean(padded)), round(fmean(shortest))


def _shape(mean: float, share: float) -> float:
    """Of the gamma distribution of that mean of which that share is longer than the cap, by halving."""

    def longer(shape: float) -> float:
        scale, step = mean / shape, mean / 100
        places = [LONGEST + step * number for number in range(1000)]
        constant = math.lgamma(shape) + shape * math.log(scale)
        return step * sum(math.exp((shape - 1) * math.log(place) - place / scale - constant) for place in places)

    low, high = 1.0, 100.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if longer(middle) > share else (low, middle)
    return low


@cache
def _diffusers() -> Path | None:
    """Its package: of this environment, or of the one with a CUDA build of torch, of whose other packages nothing is wanted."""
    here = importlib.util.find_spec("diffusers")
    if here and here.origin:
        return Path(here.origin).parent
    return next(LEAGUE.parents[1].glob(".venv-cuda/lib/python*/site-packages/diffusers"), None)


@cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@cache
def _folder() -> Path:
    """The model's folder: its configuration, and a checkpoint that has names and shapes, and holes for weights."""
    packages, diffusers = Path(_temporary().name, "packages"), _diffusers()
    packages.mkdir()
    if diffusers:
        (packages / "diffusers").symlink_to(diffusers)
        sys.path.append(str(packages))
    running.preload("transformers.models.llama.modeling_llama", "peft", "torch._inductor.cudagraph_trees")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(_temporary().name, "model")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(preset_config(MODEL)), "utf-8")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    names: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, weight in model.named_parameters():
        begin, end = end, end + weight.nbytes
        names[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [begin, end]}
    header = json.dumps(names).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(file.tell() + end)
    return folder


SOURCE = Source(
    "peft",
    "PEFT's comparison of methods",
    "huggingface/peft method_comparison/*/results at 5d602fdbff04c33c1c4de55cda9d4ae1d7cb7e40",
    read,
    predict,
    slow=lambda row: "waveft" in row.name,  # shuffles the places of every weight, for each layer
)
