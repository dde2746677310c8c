"""What the planner counts from a configuration is what the engine's parts hold, to the byte."""

from typing import Any

import pytest
import torch

from serve.models.tiny import CASES, make_model
from tonnage.budget.serving.memory import ServingConfiguration, serving_budget
from tonnage.budget.serving.own_engine import own_block_bytes, own_weight_terms, share_bytes, widths_of
from tonnage.hardware import find_gpu
from tonnage.models.config import from_config
from tonnage.models.shape import ModelShape
from tonnage.serve.cache.kv_cache import CacheShape, KvCache
from tonnage.serve.config import EngineConfig
from tonnage.serve.models.architecture import Architecture, architecture_of
from tonnage.serve.models.load import random_decoder
from tonnage.serve.startup import DeviceMemory, Startup

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def read(case: str) -> tuple[ModelShape, Architecture]:
    config = make_model(case).config.to_dict()
    return from_config(config), architecture_of(config)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8", "fp8"])
def test_weights(case: str, weights: str) -> None:
    shape, architecture = read(case)
    eight_bit = weights if weights in ("int8", "fp8") else None
    decoder = random_decoder(architecture, "cpu", DTYPES.get(weights, torch.bfloat16), weights=eight_bit)
    assert decoder.weight_bytes == sum(int(term.size_bytes) for term in own_weight_terms(shape, weights))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kv", ["bf16", "fp32", "fp8"])
def test_blocks(case: str, kv: str) -> None:
    shape, architecture = read(case)
    pages = CacheShape(
        layers=len(architecture.layers), kv_heads=architecture.kv_heads, head_dim=architecture.head_dim,
        dtype=DTYPES.get(kv, torch.bfloat16), fp8=kv == "fp8",
    )  # fmt: skip
    cache = KvCache(pages, 5, torch.device("cpu"))
    held = cache.pages.nbytes + (cache.scales.nbytes if cache.scales is not None else 0)
    assert 5 * own_block_bytes(widths_of(shape), kv) == cache.size_bytes == held


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("share", "flags"),
    [
        (0.9, {}),
        (0.9, {"kv": "fp8", "weights": "int8", "max_seqs": 48, "block": 32}),
        (0.5, {"batched_tokens": 1000, "eager": True}),
    ],
    ids=["usual", "8 bits", "eager"],
)
def test_a_start_plans_the_blocks_that_the_planner_says(case: str, share: float, flags: dict[str, Any]) -> None:
    shape, architecture = read(case)
    card, limit = find_gpu("h200"), share_bytes(find_gpu("h200").memory_bytes, share)
    memory = DeviceMemory(
        device=torch.device("cuda"), name=card.name, gpu=card, capacity_bytes=card.memory_bytes, limit_bytes=limit
    )
    planned = Startup(architecture, torch.bfloat16, EngineConfig(context=100, **flags), memory).plan()
    asked = {"engine": "tonnage", "context": 100, "weights": "bf16", "utilization": share, **flags}
    budget = serving_budget(shape, ServingConfiguration(**asked), card)
    assert planned.pool.blocks == budget.kv.blocks > 0
    assert planned.total_bytes == budget.total_bytes
