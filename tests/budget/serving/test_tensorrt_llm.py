"""TensorRT-LLM: a share of what is free at the peak of a dry run."""

from dataclasses import replace

import pytest

from serving_shapes import LLAMA_8B
from tonnage.budget.serving.memory import ServingBudget, ServingConfiguration, serving_budget
from tonnage.hardware import find_gpu
from tonnage.ledger import Category
from tonnage.models import find_model
from tonnage.units import GIB

ASKED = ServingConfiguration(engine="tensorrt-llm", context=8192, users=8)


def budget(card: str = "h100", **changed: object) -> ServingBudget:
    return serving_budget(LLAMA_8B, replace(ASKED, **changed), find_gpu(card))  # type: ignore[arg-type]


def test_a_tenth_of_the_rest_stays_free() -> None:
    found = budget()
    peak = found.total_bytes - found.ledger[Category.KV_CACHE]
    rest = found.capacity_bytes - peak
    assert found.ledger[Category.KV_CACHE] == pytest.approx(0.9 * rest, rel=0.001)
    assert found.capacity_bytes - found.total_bytes == pytest.approx(0.1 * rest, rel=0.01)


def test_its_defaults() -> None:
    found = budget().configuration
    assert (found.block, found.max_seqs, found.batched_tokens, found.utilization) == (32, 2048, 8192, 0.9)


def test_fewer_sequences_leave_more_for_the_cache() -> None:
    assert budget(max_seqs=64).kv.tokens > budget(max_seqs=2048).kv.tokens


def test_a_neighbour_takes_its_part_of_the_rest() -> None:
    lost = budget().kv.available_bytes - budget(reserved_bytes=10 * GIB).kv.available_bytes
    assert lost == pytest.approx(9 * GIB, rel=0.001)


def test_a_published_start() -> None:
    """Qwen3-Reranker-0.6B on an H100 allotted 68.69 GiB for 643,136 tokens (a public note on TensorRT-LLM's PyTorch backend)."""
    shape = find_model("qwen3-0.6b")
    found = serving_budget(shape, replace(ASKED, context=4096), find_gpu("h100"))
    assert found.kv.layout.bytes_per_token == 114688
    assert found.kv.tokens == pytest.approx(643136, rel=0.02)


def test_older_cards_are_told() -> None:
    assert any("does not start" in note for note in budget(card="t4").notes)
    assert not any("does not start" in note for note in budget().notes)
