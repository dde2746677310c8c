"""Two models on one card: shares that leave room for both."""

import pytest

from tonnage.budget.serving.memory import ServingConfiguration
from tonnage.errors import RequestError
from tonnage.hardware import find_cluster
from tonnage.models import find_model
from tonnage.planner.serving.beside import Neighbour, of_model, of_size, reserved
from tonnage.planner.serving.search import plan_serving
from tonnage.units import GIB

CLUSTER = find_cluster("l40s")
CARD = CLUSTER.gpu.memory_bytes


def neighbour(model: str, before: tuple[Neighbour, ...] = (), **asked: object) -> Neighbour:
    configuration = ServingConfiguration(**asked)  # type: ignore[arg-type]
    return of_model(model, find_model(model), configuration, CLUSTER, model=model, before=before)


def test_both_fit_at_once() -> None:
    other = neighbour("qwen3-embedding-0.6b", context=2048, users=16)
    plan = plan_serving(find_model("llama-3.1-8b"), CLUSTER, reserved(ServingConfiguration(users=4), [other]))
    assert plan.fits
    assert plan.best.budget.total_bytes + other.claimed_bytes <= CARD
    # Shares are of the whole card, and each process has a context of its own beside its share.
    assert plan.best.configuration.utilization + other.share < 1
    assert plan.best.configuration.utilization < 0.92


def test_a_neighbour_gets_the_smallest_share_that_holds_its_users() -> None:
    other = neighbour("qwen3-0.6b", context=4096, users=8)
    assert other.plan is not None and other.plan.fits
    less = ServingConfiguration(context=4096, users=8, max_seqs=8, utilization=round(other.share - 0.01, 2))
    assert not plan_serving(find_model("qwen3-0.6b"), CLUSTER, less).fits


def test_an_encoder_needs_no_cache() -> None:
    other = neighbour("bge-m3", context=512, users=16)
    assert other.plan is None
    assert GIB < other.claimed_bytes < 4 * GIB


@pytest.mark.parametrize("engine", ["sglang", "tensorrt-llm", "llama.cpp", "tonnage"])
def test_every_engine_leaves_what_others_hold(engine: str) -> None:
    weights = "q4_k_m" if engine == "llama.cpp" else ""
    asked = ServingConfiguration(engine=engine, users=1, weights=weights)  # type: ignore[arg-type]
    held = of_size("20GiB", 20 * GIB, CLUSTER)
    plan = plan_serving(find_model("llama-3.1-8b"), CLUSTER, reserved(asked, [held]))
    assert plan.fits
    assert plan.best.budget.total_bytes + held.claimed_bytes <= CARD


def test_a_share_that_is_offered_leaves_the_neighbour_its_room() -> None:
    asked = reserved(ServingConfiguration(users=4), [of_size("6GiB", 6 * GIB, CLUSTER)])
    plan = plan_serving(find_model("llama-3.1-8b"), CLUSTER, asked)
    offered = [float(change.flag.split()[1]) for change in plan.changes if "--utilization" in change.flag]
    assert all(share * CARD + 6 * GIB <= CARD for share in offered)


def test_what_does_not_fit_is_refused_with_the_reason() -> None:
    with pytest.raises(RequestError, match="leaves nothing"):
        of_size("60GiB", 60 * GIB, CLUSTER)
    with pytest.raises(RequestError, match="does not fit"):
        neighbour("llama-3.3-70b")
    with pytest.raises(RequestError, match="does not fit"):
        neighbour("qwen3-8b", before=(of_size("35GiB", 35 * GIB, CLUSTER),))


def test_a_cluster_without_what_others_hold() -> None:
    assert CLUSTER.without(6 * GIB).gpu.memory_bytes == CARD - 6 * GIB
    with pytest.raises(RequestError, match="leave nothing"):
        CLUSTER.without(50 * GIB)
