"""What else could be had: each offer is a plan that its flag finds, with the gain that it says."""

from dataclasses import replace
from typing import Any

import pytest

from tonnage.clock.ranges import comparison_error
from tonnage.hardware import find_cluster
from tonnage.models import find_model
from tonnage.planner.training.offers import Offer, offers
from tonnage.planner.training.request import Offload, TrainingRequest
from tonnage.planner.training.search import PlanSearch, search


def asked(gpus: str, model: str = "llama-3.1-8b", **request: Any) -> PlanSearch:
    return search(find_model(model), find_cluster(gpus), TrainingRequest(**{"seq": 8192} | request))


@pytest.fixture(scope="module")
def eight() -> PlanSearch:
    return asked("8xh100")


@pytest.fixture(scope="module")
def offered(eight: PlanSearch) -> dict[str, Offer]:
    return {offer.flag: offer for offer in offers(eight)}


def test_each_other_framework_is_offered_with_its_gain(eight: PlanSearch, offered: dict[str, Offer]) -> None:
    assert eight.best is not None
    names = {flag.split()[1] for flag in offered if flag.startswith("--framework")}
    assert names | {eight.best.configuration.framework} >= {"deepspeed", "fsdp2", "megatron", "nanotron"}
    for offer in offered.values():
        assert offer.plan.fits and offer.plan.total_bytes <= 0.95 * offer.plan.capacity_bytes
        assert offer.gain == pytest.approx(offer.plan.tokens_per_s / eight.best.tokens_per_s - 1)


@pytest.mark.parametrize("flag", ["--framework megatron", "--framework nanotron", "--compile"])
def test_an_offer_is_about_what_its_flag_finds(flag: str, eight: PlanSearch, offered: dict[str, Offer]) -> None:
    name, _, value = flag.removeprefix("--").partition(" ")
    changed: dict[str, Any] = {name: value or True}
    found = search(eight.shape, eight.cluster, replace(eight.request, **changed))
    assert found.best is not None and found.fastest is not None
    speed = offered[flag].plan.tokens_per_s
    assert found.best.tokens_per_s / 1.02 <= speed <= found.fastest.tokens_per_s * 1.001


def test_changes_are_offered_where_they_gain(offered: dict[str, Offer]) -> None:
    changes = {flag: offer for flag, offer in offered.items() if not flag.startswith("--framework")}
    assert "--compile" in changes
    assert all(offer.gain > comparison_error() for offer in changes.values())
    assert list(offered.values()) == sorted(offered.values(), key=lambda offer: -offer.gain)


def test_other_numbers_are_marked() -> None:
    bert, llama = (
        {offer.flag: offer for offer in offers(asked("h200", name, seq=512))} for name in ("bert-base", "llama-3.2-1b")
    )
    assert bert["--precision bf16"].numbers and not llama["--compile"].numbers
    assert "--compile" not in bert  # a compiled encoder of transformers has no fused attention


def test_a_flag_that_is_given_is_not_offered_again() -> None:
    found = offers(asked("8xh100", framework="fsdp2", compile=True, precision="bf16"))
    assert not any(offer.flag.startswith(("--framework", "--compile", "--precision")) for offer in found)
    assert all(offer.plan.configuration.compile for offer in found)


def test_nanotron_is_offered_for_what_it_has_blocks_for() -> None:
    flags = {offer.flag for offer in offers(asked("8xh100", "gemma-2-2b", seq=4096))}
    assert "--framework megatron" in flags and "--framework nanotron" not in flags


def test_adapters_are_not_offered_frameworks_that_do_not_train_them() -> None:
    assert not {"--framework megatron", "--framework nanotron"} & {
        offer.flag for offer in offers(asked("8xh100", lora_rank=16))
    }


def test_offload_is_offered_where_it_would_gain() -> None:
    found = {offer.flag for offer in offers(asked("64xh100", "llama-3.1-70b", pp=1, cp=1))}
    assert any(flag.startswith("--offload") for flag in found)


def test_nothing_is_offered_where_nothing_fits() -> None:
    assert offers(asked("h100", "llama-3.1-70b", offload=Offload())) == []
