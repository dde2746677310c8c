"""Plans for vision-language models, held against steps of the real models on the virtual GPU (benchmarks/vision_language.py)."""

import json
from pathlib import Path
from typing import Any

import pytest

from tonnage.budget.training.configuration import Configuration
from tonnage.budget.training.memory import training_budget
from tonnage.hardware import find_gpu
from tonnage.models.config import from_config
from tonnage.models.freezing import freeze
from tonnage.models.pictures import with_pictures

MEASURED = json.loads((Path(__file__).parents[3] / "benchmarks/results/vision-language.json").read_text())


def planned_bytes(config: dict[str, Any], flags: dict[str, Any]) -> float:
    shape = from_config(config)
    if len(shape.stacks) > 1:
        shape, _ = with_pictures(shape, flags["images"], str(flags["image_size"]))
    shape = freeze(shape, flags["freeze"]) if flags["freeze"] else shape
    configuration = Configuration(
        precision=flags["precision"], checkpoint=flags["checkpoint"], optimizer_kernel="fused", seq=flags["seq"],
        micro_batch=flags["batch"], lora_rank=flags["lora"],
    )  # fmt: skip
    return float(training_budget(shape, configuration, find_gpu("h200")).peak_allocated_bytes)


@pytest.mark.parametrize("name", MEASURED["cases"])
def test_peaks_are_within_three_percent(name: str) -> None:
    case = MEASURED["cases"][name]
    planned = planned_bytes(MEASURED["models"][case["model"]], case["flags"])
    assert planned == pytest.approx(case["peak_allocated_bytes"], rel=0.03)


def test_every_way_to_train_is_among_them() -> None:
    flags = [case["flags"] for case in MEASURED["cases"].values()]
    assert len(flags) >= 12
    assert {flag["freeze"] for flag in flags} == {"", "vision", "vision,language", "all-but-last-4"}
    assert {flag["precision"] for flag in flags} == {"fp32", "bf16", "bf16-mixed"}
    assert {flag["checkpoint"] for flag in flags} == {"none", "full"}
    assert any(flag["lora"] for flag in flags)


def test_frozen_layers_before_all_that_is_trained_keep_nothing() -> None:
    config = MEASURED["models"]["llava"]["text_config"]
    flags = {
        "images": None,
        "image_size": "",
        "precision": "bf16",
        "checkpoint": "none",
        "seq": 4096,
        "batch": 4,
        "lora": 0,
    }

    def kept(what: str) -> float:
        shape = freeze(from_config(config), what) if what else from_config(config)
        budget = training_budget(shape, Configuration(precision="bf16", seq=4096, micro_batch=4), find_gpu("h200"))
        return sum(float(term.size_bytes) for term in budget.terms if term.name.startswith("kept by"))

    # Of 16 layers 4 keep something; the norm before the head is beside them.
    assert kept("all-but-last-4") == pytest.approx(kept("") / 4, rel=0.05)
    assert (
        planned_bytes(config, flags | {"freeze": "all-but-last-4"}) < planned_bytes(config, flags | {"freeze": ""}) / 2
    )
