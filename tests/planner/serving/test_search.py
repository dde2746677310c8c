"""Layouts of a model on GPUs, and what is offered where none fits."""

from dataclasses import replace

import pytest

from serving_shapes import LLAMA_8B, LLAMA_70B, attention, layer, model
from tonnage.budget.serving.memory import ServingConfiguration, serving_budget
from tonnage.errors import RequestError
from tonnage.hardware import find_cluster
from tonnage.models import find_model
from tonnage.models.shape import ModelShape
from tonnage.planner.serving.search import ServingPlan, plan_serving

ASKED = ServingConfiguration(context=8192, users=16)


def plan(
    shape: ModelShape = LLAMA_8B, gpus: str = "4xh100", tp: int = 0, pp: int = 0, **changed: object
) -> ServingPlan:
    return plan_serving(shape, find_cluster(gpus), replace(ASKED, **changed), tp=tp, pp=pp)  # type: ignore[arg-type]


def test_every_layout_uses_every_gpu() -> None:
    found = plan()
    layouts = (found.best, *found.others)
    assert {(each.configuration.tp, each.configuration.pp, each.replicas) for each in layouts} == {
        (1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1),
    }  # fmt: skip
    assert all(each.configuration.users * each.replicas >= 16 for each in layouts)


def test_the_fastest_that_fits_is_first() -> None:
    found = plan()
    assert found.fits
    assert found.best.tokens_per_s == max(each.tokens_per_s for each in (found.best, *found.others) if each.fits)


def test_what_is_given_is_kept() -> None:
    found = plan(tp=2, pp=2)
    assert (found.best.configuration.tp, found.best.configuration.pp, found.others) == (2, 2, ())


@pytest.mark.parametrize(("tp", "pp"), [(3, 0), (2, 3), (8, 0)])
def test_a_layout_that_does_not_divide_the_gpus(tp: int, pp: int) -> None:
    with pytest.raises(RequestError, match="do not divide 4"):
        plan(tp=tp, pp=pp)


def test_a_layout_that_does_not_divide_the_heads() -> None:
    with pytest.raises(RequestError, match="--tp 3 does not divide"):
        plan(gpus="3xh100", tp=3)


def test_our_engine_is_copied() -> None:
    best = plan(engine="tonnage").best
    assert (best.replicas, best.configuration.users, best.configuration.gpus) == (4, 4, 1)


def test_changes_keep_what_they_promise() -> None:
    shape, users = LLAMA_70B, 256
    found = plan(shape, users=users)
    assert not found.fits and found.changes
    for change in found.changes:
        words = change.flag.split()
        given = dict(zip(words[::2], words[1::2], strict=True))
        asked = replace(
            ASKED,
            users=int(given.get("--users", users)),
            context=int(given.get("--context", ASKED.context)),
            kv=given.get("--kv", ""),
            weights=given.get("--weights", ""),
        )
        again = plan_serving(shape, find_cluster(given.get("--gpus", "4xh100")), asked)
        assert again.fits, change
        assert again.best.most_users >= change.users >= asked.users


def test_a_share_that_leaves_no_room_for_the_context() -> None:
    found = plan(gpus="h100", utilization=1.0)
    assert not found.fits and found.best.budget.needed_bytes > found.best.budget.available_bytes
    share = float(found.changes[0].flag.removeprefix("--utilization "))
    assert plan(gpus="h100", utilization=share).fits and not plan(gpus="h100", utilization=share + 0.01).fits


def test_the_edge_of_the_changes() -> None:
    found = plan(LLAMA_70B, users=256)
    fewer = next(change for change in found.changes if change.flag.startswith("--users"))
    assert not plan(
        LLAMA_70B, users=fewer.users + 1, tp=found.best.configuration.tp, pp=found.best.configuration.pp
    ).fits


def test_decoding_reads_weights_and_cache() -> None:
    cluster = find_cluster("h100")
    one = plan_serving(LLAMA_8B, cluster, replace(ASKED, users=1, context=16)).best
    weights = LLAMA_8B.parameters * 2
    assert one.decode_step_s == pytest.approx(weights / cluster.gpu.bandwidth_bytes_per_s, rel=0.01)
    full = plan_serving(LLAMA_8B, cluster, replace(ASKED, users=40)).best
    read = (full.decode_step_s - one.decode_step_s) * cluster.gpu.bandwidth_bytes_per_s
    assert read == pytest.approx(40 * 8192 * 131072, rel=0.01)


def test_few_tokens_touch_few_experts() -> None:
    shape = model([layer(attention(), 4096, 1024, experts=64)] * 8)
    few, many = (plan_serving(shape, find_cluster("h100"), replace(ASKED, users=n, context=16)).best for n in (1, 256))
    assert few.decode_step_s < 0.5 * many.decode_step_s


def test_a_plan_is_that_of_its_budget() -> None:
    best = plan().best
    assert best.budget == serving_budget(LLAMA_8B, best.configuration, find_cluster("4xh100").gpu)


def test_more_room_is_never_offered_for_fewer_users_than_fit() -> None:
    for gpus, users in (("h100", 1), ("4xh100", 8)):
        found = plan(gpus=gpus, users=users)
        assert found.fits and found.changes
        assert all(change.users >= min(found.best.most_users, 1024) for change in found.changes)


def test_an_offered_share_leaves_room_for_what_is_unsure() -> None:
    found = plan(gpus="h200", users=4)
    (share,) = (float(each.flag.split()[1]) for each in found.changes if each.flag.startswith("--utilization"))
    budget = found.best.budget
    assert budget.configuration.utilization < share < budget.largest_utilization


def test_the_least_of_the_common_cards_that_would_do_is_offered() -> None:
    shape, asked = find_model("deepseek-v3"), ServingConfiguration()
    plan = plan_serving(shape, find_cluster("8xh100"), asked)
    offered = [change for change in plan.changes if "would do" in change.words]
    assert [change.flag for change in offered] == ["--gpus 8xh200"]
    assert plan_serving(shape, find_cluster("8xh200"), asked).fits
