"""Every card of the catalogue is planned for, and none in a format that it lacks."""

import pytest

from tonnage.budget.serving.memory import ServingConfiguration
from tonnage.hardware import all_gpus, find_cluster
from tonnage.models import find_model
from tonnage.planner.serving.search import plan_serving
from tonnage.planner.training.request import TrainingRequest
from tonnage.planner.training.search import search

SHAPE = find_model("qwen2.5-0.5b")


@pytest.mark.parametrize("card", all_gpus(), ids=lambda card: card.key)
def test_plans(card) -> None:
    cluster = find_cluster(card.key)
    found = search(SHAPE, cluster, TrainingRequest(seq=1024, micro_batch=1, zero=0))
    served = plan_serving(SHAPE, cluster, ServingConfiguration())
    assert found.best is None or found.best.tokens_per_s > 0
    assert served.fits
    assert served.best.tokens_per_s > 0
    lacking = "bf16" not in card.rates
    assert ("bf16" in found.request.precision) != lacking
    assert (served.best.configuration.weights, served.best.configuration.kv) == (
        ("fp16",) * 2 if lacking else ("bf16",) * 2
    )
