"""The search: what it finds is what the formulas say, and nothing that fits is better."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tonnage.budget.time.step import step_time
from tonnage.budget.training.memory import needed_bytes, training_budget
from tonnage.clock.ranges import comparison_error
from tonnage.errors import BadLayout
from tonnage.hardware import find_cluster
from tonnage.models import find_model
from tonnage.planner.training.offers import offers
from tonnage.planner.training.reasons import rejected
from tonnage.planner.training.remedies import next_plan, remedies
from tonnage.planner.training.request import Offload, TrainingRequest
from tonnage.planner.training.search import PlanSearch, judge, plan_of, search
from tonnage.planner.training.space import CHECKPOINTS, layouts, passes, shardings
from tonnage.units import GIB


@pytest.fixture(scope="module")
def eight() -> PlanSearch:
    return search(find_model("llama-3.1-8b"), find_cluster("8xh100"), TrainingRequest(seq=8192))


def test_the_best_fits_and_is_the_fastest_but_for_what_the_clock_errs_by(eight: PlanSearch) -> None:
    assert eight.best is not None and eight.best.fits and eight.fastest is not None
    top = max(one.tokens_per_s[one.fits].max() for one in eight.pool if one.fits.any())
    assert eight.fastest.tokens_per_s == pytest.approx(top)
    assert 0 <= eight.gain_of_fastest <= comparison_error()


def test_plans_leave_headroom_where_they_can(eight: PlanSearch) -> None:
    assert all(plan.total_bytes <= 0.95 * plan.capacity_bytes for plan in (eight.closest, *eight.alternatives))
    least = search(
        find_model("gpt2"),
        find_cluster("t4"),
        TrainingRequest(seq=1024, precision="fp16-mixed", micro_batch=4, checkpoint="none"),
    )
    size = least.closest.total_bytes
    tight = replace(least.cluster, gpu=replace(least.cluster.gpu, memory_bytes=round(size * 1.01)))
    found = search(least.shape, tight, replace(least.request, loss=least.closest.configuration.loss))
    assert found.best is not None and found.best.total_bytes == pytest.approx(size, abs=1)


# All families of models; a coarse space, so that all of it is looked at in a moment. benchmarks/planner_best.py has all of it.
COARSE = [
    ("llama-3.1-8b", "8xh100", {"seq": 8192, "global_batch": 64}),
    ("llama-3.1-8b", "h200", {"seq": 4096, "global_batch": 32}),
    ("llama-3.2-1b", "2xrtx-3090", {"seq": 2048, "global_batch": 64}),
    ("llama-3.1-8b", "2xrtx-4090", {"seq": 2048, "lora_rank": 16, "base": "nf4", "global_batch": 16}),
    ("qwen3-4b", "4xrtx-4090", {"seq": 4096, "global_batch": 32}),
    ("gemma-2-9b", "8xa100-80", {"seq": 4096, "tp": 1, "pp": 1, "global_batch": 32}),
    ("mixtral-8x7b", "16xh100", {"seq": 4096, "pp": 1, "cp": 1, "global_batch": 64}),
    ("bert-base", "2xrtx-3090", {"seq": 512, "global_batch": 128}),
    ("t5-base", "2xl4", {"seq": 512, "global_batch": 64}),
    ("vit-base", "a100-40", {"seq": 197, "global_batch": 64}),
    ("gpt2", "t4", {"seq": 1024, "global_batch": 16}),
    ("mamba-2.8b", "4xh100", {"seq": 4096, "global_batch": 32}),
    ("llama-3.1-70b", "8xh200", {"seq": 8192, "cp": 1, "pp": 1}),
]


@pytest.mark.parametrize(("model", "gpus", "asked"), COARSE)
def test_nothing_in_the_space_is_faster(model: str, gpus: str, asked: dict[str, Any]) -> None:
    """Every configuration, one family after the other and without shortcuts."""
    shape, cluster, request = find_model(model), find_cluster(gpus), TrainingRequest(**asked)
    found = search(shape, cluster, request)
    assert found.best is not None
    rows, top, looked = layouts(shape, cluster, request), 0.0, 0
    searched = {one.family.offload for one in found.judged}
    for sharding in (sharding for offload in searched for sharding in shardings(request, rows, offload)):
        for way in passes(request, sharding.offload):
            one = judge(shape, cluster, found.clock, sharding.running(*way), timed="what leaves headroom")
            looked += one.family.size
            top = max(top, float(np.max(one.tokens_per_s, where=one.leaves_headroom, initial=0.0)))
    assert looked == found.searched
    tried = max(float(np.max(one.tokens_per_s, where=one.leaves_headroom, initial=0.0)) for one in found.judged)
    assert tried >= top / 1.005


def test_most_is_ruled_out(eight: PlanSearch) -> None:
    assert eight.looked_at < eight.searched / 3


def test_offload_is_looked_at_where_memory_is_short() -> None:
    found = search(find_model("llama-3.1-70b"), find_cluster("64xh100"), TrainingRequest(seq=8192, pp=1, cp=1))
    assert found.best is not None and found.best.offload == Offload()
    assert any(one.family.offload != Offload() for one in found.judged)
    small = search(find_model("bert-base"), find_cluster("h200"), TrainingRequest(seq=512))
    assert all(one.family.offload == Offload() for one in small.judged)


@pytest.mark.parametrize("places", [Offload(), Offload(optimizer="host", parameters="host", activations="nvme")])
def test_what_the_search_compares_is_the_budget(eight: PlanSearch, places: Offload) -> None:
    rows = layouts(eight.shape, eight.cluster, eight.request)
    for sharding in shardings(eight.request, rows, places):
        asked = sharding.running("selective", "full").configuration
        budget = training_budget(eight.shape, asked, eight.cluster.gpu)
        needed = needed_bytes(eight.shape, asked, eight.cluster.gpu)
        assert np.allclose(needed.total_bytes, budget.total_bytes)
        assert np.allclose(needed.host_bytes, budget.host_bytes)
        assert np.allclose(needed.drive_bytes, budget.drive_bytes)


def test_a_plan_is_what_the_formulas_say_of_it(eight: PlanSearch) -> None:
    for plan in (eight.closest, *eight.alternatives):
        budget = training_budget(eight.shape, plan.configuration, eight.cluster.gpu)
        assert plan.total_bytes == pytest.approx(float(budget.total_bytes), abs=1)
        time = step_time(eight.shape, plan.configuration, eight.cluster)
        assert plan.step_s == pytest.approx(float(time.total_s))
        assert plan.ledger.total_bytes == pytest.approx(plan.total_bytes, abs=len(plan.terms))
        assert plan.configuration.gpus == 8


def test_alternatives_differ_in_kind_and_fit(eight: PlanSearch) -> None:
    kinds = [
        (c.zero, c.tp, c.pp, c.cp, c.ep, c.checkpoint, plan.offload)
        for plan in (eight.closest, *eight.alternatives)
        for c in [plan.configuration]
    ]
    assert len(set(kinds)) == len(kinds) > 1
    assert all(plan.fits for plan in eight.alternatives)


def test_nothing_that_fits_is_both_faster_and_smaller_than_the_front(eight: PlanSearch) -> None:
    front = eight.front
    sizes = [plan.total_bytes for plan in front]
    speeds = [plan.tokens_per_s for plan in front]
    assert sizes == sorted(sizes, reverse=True) and speeds == sorted(speeds, reverse=True)
    for plan in front:
        for one in eight.judged:
            better = (
                one.fits & (one.tokens_per_s > plan.tokens_per_s * 1.000001) & (one.total_bytes < plan.total_bytes - 1)
            )
            assert not better.any()


def test_every_rejected_value_has_a_reason(eight: PlanSearch) -> None:
    reasons = {(reason.choice, reason.value): reason for reason in rejected(eight)}
    assert {value for choice, value in reasons if choice == "tp"} == {"2", "4", "8"}
    taken = {eight.closest.configuration.checkpoint}
    assert {value for choice, value in reasons if choice == "checkpoint"} == set(CHECKPOINTS) - taken
    assert "collectives take" in reasons["tp", "8"].words
    assert "recomputing takes" in reasons["checkpoint", "full"].words
    assert all(reason.words for reason in reasons.values())
    assert all((reason.slower is None) != (reason.needs_bytes is None) for reason in reasons.values())


def test_what_does_not_fit_says_what_it_needs() -> None:
    found = search(find_model("llama-3.1-8b"), find_cluster("8xh100"), TrainingRequest(seq=4096, tp=1, pp=1, cp=1))
    reason = next(reason for reason in rejected(found) if (reason.choice, reason.value) == ("zero", "0"))
    assert reason.needs_bytes is not None and reason.needs_bytes > found.cluster.gpu.memory_bytes
    assert "GiB a GPU, of which" in reason.words


def test_tensor_parallelism_across_hosts_is_named() -> None:
    found = search(find_model("llama-3.1-8b"), find_cluster("16xh100"), TrainingRequest(seq=8192))
    reason = next(reason for reason in rejected(found) if (reason.choice, reason.value) == ("tp", "16"))
    assert "crosses hosts" in reason.words


def test_a_fixed_configuration_is_the_one_that_comes_back() -> None:
    asked = TrainingRequest(
        seq=1024, precision="bf16", micro_batch=2, checkpoint="full", loss="full", optimizer_kernel="foreach"
    )
    found = search(find_model("llama-3.2-1b"), find_cluster("h200"), asked)
    assert found.searched == 1 and found.best is not None
    chosen = found.best.configuration
    assert (chosen.micro_batch, chosen.accumulate, chosen.checkpoint, chosen.framework) == (2, 1, "full", "torch")
    assert chosen.optimizer_kernel == "foreach"
    assert rejected(found) == []


def test_offload_is_found_where_nothing_else_fits() -> None:
    found = search(find_model("llama-3.1-8b"), find_cluster("a100-40"), TrainingRequest(seq=2048))
    assert found.best is not None
    assert found.best.offload.optimizer != "gpu"
    assert found.best.host_bytes > 0


def test_the_host_must_hold_what_is_offloaded() -> None:
    asked = TrainingRequest(seq=2048, offload=Offload(optimizer="host"), zero=3)
    found = search(find_model("llama-3.1-405b"), find_cluster("8xb200"), asked)
    assert all(plan.host_bytes <= plan.host_capacity_bytes for plan in found.alternatives if plan.fits)
    if found.best is None:
        assert found.closest.host_bytes > found.closest.host_capacity_bytes or not found.closest.fits


# What is short in each: nothing, loading on the host, the host, and drives.
SHORT = [
    ("llama-3.1-70b", "8xh100", {"seq": 4096}, ""),
    ("llama-3.1-70b", "8xh100", {"seq": 4096, "framework": "fsdp2", "tp": 1, "pp": 1, "cp": 1}, "loading on the host"),
    ("llama-3.1-8b", "8xa100-40", {"seq": 2048, "offload": Offload("host", "host"), "zero": 3}, "host"),
    ("llama-3.1-8b", "8xa100-40", {"seq": 2048, "offload": Offload("nvme", "nvme"), "zero": 3}, "drives"),
]


@pytest.mark.parametrize(("model", "gpus", "asked", "short"), SHORT)
def test_the_search_and_each_of_its_plans_agree_on_what_fits(
    model: str, gpus: str, asked: dict[str, Any], short: str
) -> None:
    cluster = find_cluster(gpus)
    if short == "host":
        cluster = cluster.with_host(memory_bytes=64 * GIB)
    if short == "drives":
        cluster = replace(cluster, host=replace(cluster.host, nvme_bytes=32 * GIB))
    found = search(find_model(model), cluster, TrainingRequest(**asked))
    assert found.fits == (not short) == found.closest.fits
    assert not short or short in {demand.part for demand in found.closest.shortages}
    looked = 0
    for one in found.judged[:12]:
        for row in range(0, one.family.size, max(one.family.size // 4, 1)):
            plan = plan_of(found.shape, cluster, found.clock, one, row)
            assert plan.fits == one.fits[row], plan.shortages
            missing = sum(float(demand.missing_bytes) for demand in plan.shortages)
            assert missing == pytest.approx(one.missing_bytes[row], abs=16)
            looked += 1
    assert looked > 10


def test_what_cannot_be_loaded_is_not_chosen_where_something_else_can() -> None:
    found = search(find_model("llama-3.1-70b"), find_cluster("8xh100"), TrainingRequest(seq=4096))
    for plan in (found.closest, *found.alternatives, *found.front, *(offer.plan for offer in offers(found))):
        assert not plan.shortages
    fsdp2 = [one for one in found.judged if one.family.configuration.framework == "fsdp2"]
    assert any((one.total_bytes <= found.cluster.gpu.memory_bytes).any() and not one.loads.all() for one in fsdp2)


def test_the_closest_lacks_least_of_all_parts_together() -> None:
    asked = TrainingRequest(seq=4096, framework="fsdp2", offload=Offload("host", "host"), tp=1, pp=1, cp=1)
    found = search(find_model("llama-3.1-70b"), find_cluster("8xh100"), asked)
    missing = sum(float(demand.missing_bytes) for demand in found.closest.shortages)
    assert missing == pytest.approx(min(float(one.missing_bytes.min()) for one in found.judged), abs=16)


def test_memory_that_host_and_gpu_share_holds_what_is_offloaded_too() -> None:
    asked = TrainingRequest(seq=2048, offload=Offload("host"), zero=3, micro_batch=1, checkpoint="full")
    small, large = (search(find_model(name), find_cluster("gb10"), asked) for name in ("llama-3.2-1b", "llama-3.1-8b"))
    assert small.fits and small.closest.host_bytes > 0
    assert [demand.part for demand in large.closest.shortages] == ["shared memory"]


def test_a_host_that_is_too_small_is_remedied_by_a_larger_one() -> None:
    cluster = find_cluster("8xh100").with_host(memory_bytes=300 * GIB)
    asked = TrainingRequest(seq=2048, framework="fsdp2", zero=3, tp=1, pp=1, cp=1)
    found = search(find_model("llama-3.1-8b"), cluster, asked)
    assert [demand.part for demand in found.closest.shortages] == ["loading on the host"]
    changes = remedies(found)
    assert changes[0].flag == "--framework deepspeed"
    assert any(change.flag.startswith("--host-memory ") for change in changes)
    # Other cards are tried in hosts with the memory that was stated.
    assert all(change.cluster.host.memory_bytes == 300 * GIB for change in changes if "--gpus" in change.flag)
    following = next_plan(found, changes)
    assert following is not None and following.plan.fits


def test_nothing_fits_and_each_remedy_does() -> None:
    asked = TrainingRequest(seq=8192, offload=Offload(), checkpoint="none", micro_batch=4)
    found = search(find_model("llama-3.1-70b"), find_cluster("8xh100"), asked)
    assert not found.fits
    assert found.closest.total_bytes > found.closest.capacity_bytes
    changes = remedies(found)
    assert changes
    assert all(change.total_bytes <= change.capacity_bytes for change in changes)
    assert any(change.flag.startswith("--gpus") for change in changes)


def test_the_least_of_the_common_cards_that_would_do_comes_last() -> None:
    asked = TrainingRequest(seq=4096, offload=Offload())
    found = search(find_model("llama-3.1-70b"), find_cluster("8xh100"), asked)
    last = remedies(found)[-1]
    assert (last.change, last.flag) == ("8xb200 would do", "--gpus 8xb200")
    assert search(found.shape, find_cluster("8xb200"), asked).fits


def test_a_remedy_is_the_flag_that_works() -> None:
    asked = TrainingRequest(seq=8192, offload=Offload(), checkpoint="none", zero=3, tp=1, pp=1, cp=1)
    found = search(find_model("llama-3.1-8b"), find_cluster("4xa100-80"), asked)
    assert not found.fits
    flag = next(change.flag for change in remedies(found) if change.flag.startswith("--checkpoint"))
    released = search(found.shape, found.cluster, replace(asked, checkpoint=flag.split()[1]))
    assert released.fits


def test_flags_that_exclude_each_other_are_refused() -> None:
    asked = TrainingRequest(seq=4096, pp=8, ep=8)
    with pytest.raises(BadLayout, match="does not divide the 1 GPUs of a stage"):
        search(find_model("mixtral-8x7b"), find_cluster("8xh100"), asked)


def test_adapters_fit_where_the_whole_does_not() -> None:
    shape, cluster = find_model("llama-3.1-8b"), find_cluster("rtx-4090")
    full = search(shape, cluster, TrainingRequest(seq=2048, offload=Offload()))
    adapters = search(shape, cluster, TrainingRequest(seq=2048, offload=Offload(), lora_rank=16, base="nf4"))
    assert not full.fits
    assert adapters.fits


def test_a_sequence_of_one_token_is_planned() -> None:
    """A rank of tensor parallelism then has none of its rows."""
    asked = TrainingRequest(seq=1, lora_rank=1, pp=1)
    assert search(find_model("gpt2"), find_cluster("2x4xp100"), asked).fits
