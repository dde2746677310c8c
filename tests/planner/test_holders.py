"""Which cards hold a model: the smallest that does is the smallest that a plan says yes to."""

from dataclasses import replace

import pytest

from tonnage.budget.serving.memory import ServingConfiguration
from tonnage.errors import BadLayout
from tonnage.hardware import find_cluster
from tonnage.models import find_model
from tonnage.planner.holders import serving_holders, smallest, training_holders
from tonnage.planner.serving.search import plan_serving
from tonnage.planner.training.request import NO_OFFLOAD, TrainingRequest
from tonnage.planner.training.search import search


def test_training_is_what_a_search_says() -> None:
    shape, request = find_model("qwen2.5-1.5b"), TrainingRequest(seq=2048)
    holders = training_holders(shape, request)
    assert [holder.memory_bytes for holder in holders] == sorted(holder.memory_bytes for holder in holders)
    least = smallest(holders)
    assert least is not None and not least.offload
    found = search(shape, least.cluster, TrainingRequest(seq=2048, offload=NO_OFFLOAD))
    assert found.best is not None
    assert least.tokens_per_s == found.best.tokens_per_s
    assert least.most >= found.best.configuration.micro_batch
    # A step of as many sequences fits with the largest micro-batch, and not with the next one.
    batch = found.request.step_sequences(least.cluster.gpus)
    for micro_batch, fits in ((least.most, True), (2 * least.most, False)):
        asked = replace(found.request, micro_batch=micro_batch, global_batch=batch)
        assert search(shape, least.cluster, asked).fits is fits
    smaller = [holder for holder in holders if holder.memory_bytes < least.memory_bytes and not holder.offload]
    assert all(not search(shape, each.cluster, TrainingRequest(seq=2048, offload=NO_OFFLOAD)).fits for each in smaller)


def test_serving_counts_sequences_of_the_whole_context() -> None:
    shape, asked = find_model("llama-3.1-70b"), ServingConfiguration(context=8192)
    holders = {holder.cluster.name: holder for holder in serving_holders(shape, asked)}
    assert not holders["rtx-4090"].most
    assert "h100" not in holders  # one is too small, so two are shown
    two = holders["2xh100"]
    assert two.most == plan_serving(shape, find_cluster("2xh100"), asked).best.most_users
    least = smallest(list(holders.values()))
    assert least is not None and plan_serving(shape, least.cluster, asked).fits


def test_flags_that_no_card_can_follow_leave_it_out() -> None:
    holders = serving_holders(find_model("llama-3.1-8b"), ServingConfiguration(), tp=8)
    assert {holder.cluster.gpus for holder in holders if holder.most} == {8}


def test_what_cannot_be_trained_is_refused_at_once() -> None:
    with pytest.raises(BadLayout, match="cannot be trained"):
        training_holders(find_model("unsloth/Qwen3-8B-GGUF"), TrainingRequest(seq=4096))
