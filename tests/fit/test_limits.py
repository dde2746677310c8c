"""Largest batch and longest sequence: answers on the virtual GPU, and what is wrong with a request."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tonnage
from tonnage.errors import RequestError
from tonnage.fit.limits import extrapolate
from tonnage.units import GIB, MIB

BUDGET_BYTES = 6 * GIB
PLAIN = ("batch", "sequence", "eager sequence", "at most")
counts = st.integers(0, 1 << 20)
CHANGED = ("batch under a plan", "micro-batches", "sequence when fitted")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    script = Path(__file__).with_name("virtual_limits.py")
    process = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=400)
    assert process.returncode == 0, process.stderr
    return dict(json.loads(process.stdout))


@pytest.mark.parametrize("case", [*PLAIN, "batch of the card"])
def test_a_plain_step_takes_what_was_predicted(found: dict[str, Any], case: str) -> None:
    answer = found[case]
    assert answer["predicted_peak_bytes"] == pytest.approx(answer["measured_peak_bytes"], rel=0.01)


@pytest.mark.parametrize("case", CHANGED)
def test_a_step_with_techniques_takes_about_what_was_predicted(found: dict[str, Any], case: str) -> None:
    answer = found[case]
    assert answer["predicted_peak_bytes"] == pytest.approx(answer["measured_peak_bytes"], rel=0.06)


@pytest.mark.parametrize("case", [*PLAIN, *CHANGED])
def test_the_answer_is_within_the_budget_and_took_two_steps_at_most(found: dict[str, Any], case: str) -> None:
    assert found[case]["reserved_peak_bytes"] <= BUDGET_BYTES
    assert 1 <= found[case]["steps_run"] <= 2


@pytest.mark.parametrize(("case", "unit"), [("batch", 1), ("sequence", 64), ("eager sequence", 64)])
def test_one_more_would_not_fit(found: dict[str, Any], case: str, unit: int) -> None:
    answer = found[case]
    assert answer["size"] % unit == 0
    assert answer["reserved_peak_bytes"] * (answer["size"] + 2 * unit) / answer["size"] > BUDGET_BYTES


def test_without_a_budget_the_card_is_filled(found: dict[str, Any]) -> None:
    answer, whole = found["batch of the card"], tonnage.find_gpu("h200").memory_bytes
    assert 0.95 * whole < answer["reserved_peak_bytes"] <= whole


def test_what_squares_with_the_tokens_makes_them_fewer(found: dict[str, Any]) -> None:
    assert found["eager sequence"]["size"] < 0.7 * found["sequence"]["size"]


def test_techniques_make_room_for_more(found: dict[str, Any]) -> None:
    assert found["batch under a plan"]["size"] > 2 * found["batch"]["size"]
    assert found["micro-batches"]["size"] > found["batch"]["size"]
    assert found["micro-batches"]["size"] % 2 == 0
    assert found["sequence when fitted"]["size"] > found["sequence"]["size"]


def test_the_limits_that_were_given_hold(found: dict[str, Any]) -> None:
    assert found["at most"]["size"] == 6
    assert found["at most"]["steps_run"] == 1


@pytest.mark.parametrize("case", [*PLAIN, "batch of the card", "batch under a plan", "micro-batches"])
def test_nothing_has_changed_afterwards(found: dict[str, Any], case: str) -> None:
    assert found[case]["unchanged"]


def test_a_budget_that_is_too_small_is_told_with_what_one_row_takes(found: dict[str, Any]) -> None:
    assert found["too small"].startswith("DoesNotFit: A step of 1 rows takes 1.")
    assert "fitted=" in found["too small"]


def test_a_budget_that_the_card_does_not_have_is_refused(found: dict[str, Any]) -> None:
    assert "this card has 139" in found["too large"]


def test_what_was_fitted_must_be_this_model(found: dict[str, Any]) -> None:
    assert found["another optimizer"].startswith("RequestError: What was fitted is another model")


@pytest.mark.parametrize("model", ["llama", "gpt2"])
@pytest.mark.parametrize("search", ["largest_batch", "longest_sequence"])
def test_a_model_that_caches_keys_and_values_is_searched_and_caches_again(
    found: dict[str, Any], model: str, search: str
) -> None:
    answer = found[f"{model}, {search}"]
    assert answer["size"] > 2
    assert answer["reserved_peak_bytes"] <= 2 * GIB
    assert answer["predicted_peak_bytes"] == pytest.approx(answer["measured_peak_bytes"], rel=0.07)
    assert answer["unchanged"]


def test_a_budget_is_a_number_of_any_kind_or_a_share_of_what_pytorch_could_hold(found: dict[str, Any]) -> None:
    budgets, of_words = found["budgets"], found["gpt2, largest_batch"]
    assert budgets["float"]["size"] == budgets["numpy"]["size"] == of_words["size"]
    assert 0.95 < budgets["share"]["reserved_peak_bytes"] / (0.015 * found["free"]) <= 1


def test_a_bad_budget_is_told_in_a_sentence(found: dict[str, Any]) -> None:
    for problem in found["bad budgets"]:
        assert problem.startswith("BadSize: ")
        assert "GiB" in problem


def test_what_is_on_the_card_besides_the_parameters_is_told_apart(found: dict[str, Any]) -> None:
    held = found["resident"]["plain"]
    assert held["parameters_bytes"] == found["resident"]["parameters"]
    assert 0 < held["besides_bytes"] <= found["resident"]["allocated"] - held["parameters_bytes"]


def test_states_are_found_beside_a_scheduler(found: dict[str, Any]) -> None:
    resident = found["resident"]
    assert resident["scheduled"]["states_bytes"] == resident["plain"]["states_bytes"] > 0


def test_an_optimizer_with_a_hook_before_its_step_is_stepped_whole(found: dict[str, Any]) -> None:
    assert found["resident"]["plain"]["steps_one_by_one"]
    assert not found["resident"]["hooked"]["steps_one_by_one"]


def test_a_model_on_the_cpu_is_refused() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RequestError, match="this model is on 'cpu'"):
        tonnage.largest_batch(model, optimizer, loss=lambda m, x: m(x).sum(), sample=torch.zeros(2, 4))


def test_a_sample_on_another_device_is_refused() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RequestError, match="The sample is on meta and the model on cpu"):
        tonnage.longest_sequence(
            model, optimizer, loss=lambda m, x: m(x).sum(), sample=torch.zeros(2, 4, device="meta")
        )


# Curves through a few points.


@given(counts, counts, st.integers(1, 1000))
def test_a_line_goes_on_as_a_line(start: int, slope: int, size: int) -> None:
    for sizes in ([2, 3], [2, 3, 7]):
        values = [start + slope * one for one in sizes]
        assert extrapolate(sizes, values, size) == pytest.approx(start + slope * size, abs=1)


@given(counts, counts, st.integers(1, 1 << 20), st.integers(1, 1000))
def test_a_parabola_goes_on_as_a_parabola(start: int, slope: int, bend: int, size: int) -> None:
    def value(at: int) -> int:
        return start * 8 + slope * at + (bend + start + slope) * at * at

    assert extrapolate([2, 4, 7], [value(at) for at in (2, 4, 7)], size) == pytest.approx(value(size), rel=1e-6, abs=1)


def test_a_bend_of_the_allocator_s_rounding_is_none() -> None:
    values = [1000 * MIB, 2000 * MIB - 1 * MIB, 3000 * MIB]
    assert extrapolate([10, 20, 30], values, 3000) == pytest.approx(300_000 * MIB, rel=2e-3)


def test_what_is_full_stays_full() -> None:
    assert extrapolate([10, 20, 30], [100, 512, 512], 300) == 512
    assert extrapolate([10, 20, 30], [100, 512, 512], 15) == 306


def test_one_point_is_in_proportion() -> None:
    assert extrapolate([4], [400], 10) == 1000


def test_nothing_is_less_than_nothing() -> None:
    assert extrapolate([1, 2], [100, 50], 10) == 0
