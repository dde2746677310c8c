"""fit as people call it: on the virtual GPU for what it chooses and refuses, on the CPU for the numbers of its plans."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tonnage
from fit import virtual_fits
from fit.cases import CASES, assert_same_parameters, build_training, take_step
from tonnage.fit.fitting import allowed_names
from tonnage.fit.survey.stages import candidate_rows


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


@pytest.fixture(scope="module")
def found(plans: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    """What happened to the models that this run tests."""
    own = [item for item in request.session.items if item.path == request.path]
    cases = [item.callspec.params for item in own if hasattr(item, "callspec")]
    return virtual_fits.run(plans, [name for name in ALL_MODELS if any(case.get("model") == name for case in cases)])


ALL_MODELS = ["llama", "gpt2", "t5", "vit", "resnet", "timm", "dropout"]
# Their blocks are those of another one: a decoder, and encoders of images.
ALIKE = ("gpt2", "vit")
MODELS = [pytest.param(name, marks=pytest.mark.slow if name in ALIKE else ()) for name in ALL_MODELS]


@pytest.mark.parametrize("model", MODELS)
def test_a_training_fits_its_budget_and_is_plain_again_after_undo(found: dict[str, Any], model: str) -> None:
    fit = found["fits"][model]
    assert fit["budget"] < fit["plain"]
    assert fit["rehearsed"] <= fit["budget"]
    # The rehearsal saw what steps do; the first one may leave a cached block more behind.
    assert fit["measured"] == pytest.approx(fit["rehearsed"], rel=0.01)
    assert fit["measured"] <= fit["budget"]
    assert fit["techniques"]
    assert fit["plain again"]


@pytest.mark.parametrize("model", MODELS)
def test_the_peak_is_the_one_that_was_predicted(found: dict[str, Any], model: str) -> None:
    fit = found["fits"][model]
    assert 0.97 < fit["predicted"] / fit["allocated"] < 1.05


@pytest.mark.parametrize("model", MODELS)
def test_its_account_is_at_home_in_80_columns(found: dict[str, Any], model: str) -> None:
    fit = found["fits"][model]
    lines = fit["text"].splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("NVIDIA H200 · batch of ")
    assert any(line.startswith("plain ") for line in lines)
    assert any(line.startswith("fitted, measured ") for line in lines)


def test_a_budget_below_the_parameters_says_the_smallest_that_then_does(found: dict[str, Any]) -> None:
    small = found["too small"]
    assert small["problem"].startswith("Nothing that keeps the gradients fits")
    assert small["plain"], "an error leaves nothing on the model"
    assert small["parameters"] // 2 < small["smallest"]
    assert small["measured"] <= small["smallest"]


def test_steps_taken_before_a_training_is_fitted_again_count_after_it(found: dict[str, Any]) -> None:
    large, small = found["fitted again"]["in turn"]
    assert "host-states" not in large["techniques"] and "host-states" in small["techniques"]
    assert large["steps"] == [] and small["steps"] == [2], "a rehearsal neither steps nor forgets"
    for fit in (large, small):
        assert fit["rehearsed"] <= fit["budget"]
        assert not fit["left out"]
    assert found["fitted again"]["plain"]


def test_micro_batches_that_break_a_step_are_left_out(found: dict[str, Any]) -> None:
    working, broken = found["wrong in parts"]["techniques"]
    assert "micro-batches" in working and "micro-batches" not in broken
    assert "broken" in found["wrong in parts"]["left out"]["micro-batches"]


def test_without_host_memory_nothing_is_moved_there(found: dict[str, Any]) -> None:
    with_host, without = found["no host memory"]["8 GiB"], found["no host memory"]["0"]
    assert with_host["fits"] and with_host["host_bytes"] > 0
    assert not without["fits"]
    assert without["smallest"] > virtual_fits.HOST_DECIDES_BYTES


def test_fp8_is_used_where_a_step_is_faster_with_it(found: dict[str, Any]) -> None:
    narrow, wide = (found["fp8"][str(width)] for width in virtual_fits.FP8_WIDTHS)
    assert wide == {"used": True, "left out": None, "plain": True}
    assert not narrow["used"] and narrow["plain"]
    assert re.fullmatch(r"a step takes \d+ ms with it and \d+ ms without", narrow["left out"])


PROBLEMS = {
    "not scalar": ("RequestError", "The loss is not a scalar"),
    "elsewhere": ("RequestError", "The sample is on cpu and the model on cuda"),
    "midway": ("ZeroDivisionError", "in the middle of fit"),
    "twice": ("RequestError", "fitted already"),
    "unknown name": ("RequestError", "There is no technique 'magic'"),
    "no size": ("BadSize", "'forty' is not a size"),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_what_goes_wrong_is_said_and_leaves_the_model_plain(found: dict[str, Any], problem: str) -> None:
    kind, words = PROBLEMS[problem]
    happened = found["problems"][problem]
    assert happened["kind"] == kind
    assert words in happened["message"]
    assert happened["plain"]


@pytest.mark.parametrize("model", virtual_fits.CARRIED)
def test_a_plan_made_without_a_gpu_trains_as_the_plain_model_elsewhere(
    found: dict[str, Any], plans: Path, model: str
) -> None:
    assert {"recompute", "micro-batches"} & set(found["carried"][model])
    plain, training = build_training(CASES[model]), build_training(CASES[model])
    fitted = tonnage.fit(
        training.model,
        training.optimizer,
        loss=training.loss,
        sample=training.sample,
        plan=plans / f"{model}.json",
    )
    assert {technique.name for technique in fitted.techniques} == set(found["carried"][model])
    assert fitted.prove().worst_error <= 1e-10
    for step in range(10):
        torch.manual_seed(step)
        loss = fitted.step(training.sample)
        torch.testing.assert_close(loss, take_step(plain, step), rtol=1e-10, atol=1e-10)
    fitted.undo()
    assert_same_parameters(plain.model, training.model, 1e-10)


def test_candidates_are_divisors_or_halves() -> None:
    assert candidate_rows(6, divisible=True) == [1, 2, 3, 6]
    assert candidate_rows(64, divisible=True) == [1, 2, 4, 8, 16, 32, 64]
    assert candidate_rows(64, divisible=False) == [8, 64]


def test_one_name_needs_no_list() -> None:
    names = allowed_names(True, "fp8", "compile")
    assert names == allowed_names(True, ["fp8"], ["compile"])
    assert "fp8" in names and "compile" not in names
