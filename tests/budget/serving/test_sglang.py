"""SGLang's defaults by version, and the pool that they leave."""

from dataclasses import replace

import pytest

from serving_shapes import LLAMA_8B, LLAMA_70B
from tonnage.budget.serving import sglang
from tonnage.budget.serving.memory import ServingBudget, ServingConfiguration, serving_budget
from tonnage.errors import RequestError
from tonnage.hardware import find_gpu
from tonnage.ledger import Category
from tonnage.models import find_model
from tonnage.models.shape import ModelShape
from tonnage.units import GIB

ASKED = ServingConfiguration(engine="sglang", context=8192, users=8)


def budget(shape: ModelShape = LLAMA_8B, card: str = "h100", **changed: object) -> ServingBudget:
    return serving_budget(shape, replace(ASKED, **changed), find_gpu(card))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("card", "version", "tp", "fraction", "chunk"),
    [
        ("h100", "0.5.3", 1, 0.834, 8192),  # 0.5 + 12 + 0.5 + 0.125 GiB are left
        ("h200", "0.5.3", 8, 0.896, 8192),
        ("rtx-4090", "0.4.3", 1, 0.88, 2048),
        ("l4", "0.4.6", 4, 0.85, 2048),
        ("b200", "0.5.3", 1, 0.856, 16384),
    ],
)
def test_defaults(card: str, version: str, tp: int, fraction: float, chunk: int) -> None:
    found = budget(LLAMA_70B if tp > 1 else LLAMA_8B, card, engine_version=version, tp=tp).configuration
    assert found.utilization == pytest.approx(fraction, abs=0.002)
    assert (found.batched_tokens, found.block, found.max_seqs) == (chunk, 1, 2048)


def test_the_pool_is_the_share_of_what_is_free_less_the_weights() -> None:
    found, card = budget(utilization=0.8), find_gpu("h100")
    free = card.memory_bytes - card.overheads["context"].size_bytes
    weights, kernels = found.ledger[Category.PARAMETERS], card.overheads["kernels"].size_bytes
    assert found.kv.tokens == pytest.approx((0.8 * free - weights - kernels) // found.kv.layout.bytes_per_token, abs=1)
    assert found.total_bytes == found.limit_bytes + found.outside_bytes - found.kv.available_bytes % 131072


def test_nothing_is_profiled_so_more_requests_take_nothing_from_the_pool() -> None:
    few, many = budget(max_seqs=16, utilization=0.8), budget(max_seqs=4096, utilization=0.8)
    assert few.kv.tokens == many.kv.tokens
    assert many.outside_bytes - few.outside_bytes >= (4096 - 16) * 8196 * 4


def test_a_neighbour_leaves_a_share_of_less() -> None:
    alone, beside = budget(utilization=0.8), budget(utilization=0.8, reserved_bytes=10 * GIB)
    lost = (alone.kv.tokens - beside.kv.tokens) * alone.kv.layout.bytes_per_token
    assert lost == pytest.approx(8 * GIB, rel=0.001)


def test_windows_of_gpt_oss_have_a_smaller_pool() -> None:
    shape = find_model("gpt-oss-20b")
    whole = 2 * 24 * 8 * 64 * 2
    assert budget(shape).kv.layout.bytes_per_token == int(whole * (12 + 0.8 * 12) / 24)


def test_graphs_of_prompts_leave_less_from_0_5_10() -> None:
    assert budget(engine_version="0.5.9").configuration.utilization > budget().configuration.utilization
    assert budget(eager=True).configuration.utilization > budget().configuration.utilization


def test_batches_with_graphs() -> None:
    assert sglang.decode_sizes(8) == 4
    assert sglang.decode_sizes(256) == 36  # as its logs list them
    assert sglang.decode_sizes(512) == 52


def test_what_is_refused() -> None:
    with pytest.raises(RequestError, match="not a version of SGLang"):
        budget(engine_version="0.1")
    with pytest.raises(RequestError, match="no INT4 KV cache"):
        budget(kv="int4")
    assert any("does not start" in note for note in budget(card="v100-32").notes)
