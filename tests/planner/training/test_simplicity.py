"""Within the clock's error the simpler plan is the answer, and the faster one is named."""

from dataclasses import replace

import pytest

from tonnage.budget.training.configuration import Configuration
from tonnage.clock.ranges import comparison_error
from tonnage.hardware import find_cluster
from tonnage.models import find_model
from tonnage.planner.training.request import NO_OFFLOAD, TrainingRequest
from tonnage.planner.training.search import PlanSearch, search
from tonnage.planner.training.simplicity import burden, burdens, comparable, fastest

PLAIN = Configuration(framework="fsdp2", zero=3, data=16, shard=16)
# Each asks for more than the one before it.
RISING = [
    replace(PLAIN, framework="torch", zero=0, shard=1),
    PLAIN,
    replace(PLAIN, loss="chunked"),
    replace(PLAIN, loss="chunked", shard=8),
    replace(PLAIN, framework="deepspeed"),
    replace(PLAIN, checkpoint="every-8"),
    replace(PLAIN, parameter_place="host", optimizer_place="host"),
    replace(PLAIN, tp=2, data=8, shard=8),
    replace(PLAIN, tp=16, data=1, shard=1),
    replace(PLAIN, tp=2, cp=2, data=4, shard=4),
    replace(PLAIN, tp=4, cp=4, data=1, shard=1),
]


def test_simplicity_is_an_order() -> None:
    cluster = find_cluster("16xh100")
    found = [int(burden(plan, cluster)) for plan in RISING]
    assert found == sorted(set(found))
    assert len(burdens(PLAIN, cluster)) == 6


def test_a_pipeline_may_cross_hosts() -> None:
    cluster = find_cluster("16xh100")
    pipeline, tensor = replace(PLAIN, pp=16, data=1, shard=1), replace(PLAIN, tp=16, data=1, shard=1)
    assert int(burden(pipeline, cluster)) < int(burden(tensor, cluster))


@pytest.fixture(scope="module")
def sixteen() -> PlanSearch:
    return search(find_model("llama-3.1-8b"), find_cluster("16xh100"), TrainingRequest(seq=8192))


def test_the_answer_is_the_simplest_within_the_error(sixteen: PlanSearch) -> None:
    assert sixteen.best is not None and sixteen.fastest is not None
    assert 0 < sixteen.gain_of_fastest <= comparison_error()
    cluster = sixteen.cluster
    simplest = int(burden(sixteen.best.configuration, cluster))
    assert simplest < int(burden(sixteen.fastest.configuration, cluster))
    least = sixteen.fastest.tokens_per_s / (1 + comparison_error())
    for one in sixteen.pool:
        near = one.fits & (one.tokens_per_s >= least)
        if near.any():
            assert (burden(one.family.configuration, cluster) + 0 * one.tokens_per_s)[near].min() >= simplest


def test_two_gaming_cards_are_not_asked_for_a_ring() -> None:
    found = search(find_model("llama-3.2-1b"), find_cluster("2xrtx-3090"), TrainingRequest(seq=4096))
    assert found.best is not None and found.best.configuration.cp == found.best.configuration.tp == 1


def test_offload_must_gain_more_than_a_card_s_range() -> None:
    found = search(find_model("llama-3.1-70b"), find_cluster("64xh100"), TrainingRequest(seq=8192, pp=1, cp=1))
    assert found.best is not None and found.best.offload == NO_OFFLOAD
    one, index = fastest(found.pool)
    assert one.family.offload != NO_OFFLOAD
    assert found.best.tokens_per_s < float(one.tokens_per_s[index]) < 1.25 * found.best.tokens_per_s
    assert all(each.family.offload == NO_OFFLOAD for each in comparable(found.pool, found.cluster))
