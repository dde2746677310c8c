"""llama.cpp's plans: how fast layers are read where they lie, and what is offered."""

from dataclasses import replace

import pytest

from tonnage.budget.serving.llama_cpp import LlamaBudget
from tonnage.budget.serving.memory import ServingConfiguration
from tonnage.hardware import find_cluster
from tonnage.models import find_model
from tonnage.planner.serving.search import ServingPlan, plan_serving
from tonnage.units import GIB

ASKED = ServingConfiguration(engine="llama.cpp", weights="q4_k_m", context=8192)


def plan(model: str, gpus: str, **changed: object) -> ServingPlan:
    return plan_serving(find_model(model), find_cluster(gpus), replace(ASKED, **changed))  # type: ignore[arg-type]


def test_what_lies_on_the_host_is_read_at_its_speed() -> None:
    found = plan("llama-3.3-70b", "rtx-4090")
    budget = found.best.budget
    assert isinstance(budget, LlamaBudget)
    embedding = budget.case.recipe.embedding_bytes
    host = (budget.host.weights - embedding + budget.host.cache) / 89.6e9
    card = (budget.cards[0].weights + budget.cards[0].cache) / found.cluster.gpu.bandwidth_bytes_per_s
    assert found.best.decode_step_s == pytest.approx(host + card)
    assert "of 81 layers on the host" in found.best.on_host


def test_all_on_the_card_is_faster_than_some_on_the_host() -> None:
    whole, part = plan("llama-3.1-8b", "rtx-4090"), plan("llama-3.1-8b", "rtx-4090", gpu_layers=16)
    assert not whole.best.on_host
    assert whole.best.tokens_per_s > 3 * part.best.tokens_per_s


def test_of_a_mixture_only_the_picked_experts_are_read() -> None:
    found = plan("gpt-oss-120b", "rtx-4090", weights="", cpu_experts=36, context=32768)
    # 5.1 B active parameters at about four bits, of which experts come from the host's memory.
    assert 20 < found.best.tokens_per_s < 80


def test_experts_on_the_host_are_offered() -> None:
    found = plan("gpt-oss-120b", "rtx-4090", weights="", context=32768)
    flag, number = found.changes[0].flag.split()
    assert found.fits and flag == "--cpu-moe"
    # One layer's experts more on the card, and it lacks its margin.
    fewest = plan("gpt-oss-120b", "rtx-4090", weights="", context=32768, cpu_experts=int(number), gpu_layers=37).best
    fewer = plan("gpt-oss-120b", "rtx-4090", weights="", context=32768, cpu_experts=int(number) - 1, gpu_layers=37).best
    free = [each.budget.capacity_bytes - each.budget.total_bytes for each in (fewest, fewer)]
    assert free[1] < GIB <= free[0]
    assert fewest.tokens_per_s > found.best.tokens_per_s


def test_what_does_not_fit_is_offered_fewer_layers() -> None:
    found = plan("qwen2.5-32b", "rtx-3060", gpu_layers=999)
    assert not found.fits
    assert "no --gpu-layers" in [change.flag for change in found.changes]


def test_a_host_can_be_given_more_memory() -> None:
    cluster = find_cluster("rtx-4090").with_host(memory_bytes=16 * GIB)
    assert cluster.host_memory_bytes_per_s == 89.6e9
    found = plan_serving(find_model("llama-3.3-70b"), cluster, ASKED)
    assert not found.fits
