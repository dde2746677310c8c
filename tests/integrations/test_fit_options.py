"""What a Trainer's loop rules out, and what waits in it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fit.cases import build_training, llama
from integrations.fit_runs import a_plan
from tonnage.errors import RequestError
from tonnage.fit.applied import Applied
from tonnage.fit.fitted import Fitted
from tonnage.fit.fitting import FitOptions
from tonnage.fit.prove.rehearsal import Rehearsed
from tonnage.fit.techniques.step_in_backward import StepInBackward
from tonnage.integrations.fit_options import add_waiting, parts_of, plan_for_loop


@pytest.mark.parametrize("saved", [False, True])
def test_a_plan_with_what_the_loop_rules_out_is_refused_with_the_reason(tmp_path: Path, saved: bool) -> None:
    plan = a_plan(StepInBackward())
    plan.save(tmp_path / "plan.json")
    options = FitOptions(plan=str(tmp_path / "plan.json") if saved else plan)
    with pytest.raises(RequestError, match=r"holds step-in-backward, .*: it must not"):
        plan_for_loop(options, {"step-in-backward": "it must not"})
    assert plan_for_loop(options, {"fp8": "another"}) == plan


def test_gradients_that_wait_are_in_the_account() -> None:
    training = build_training(llama)
    plan = replace(a_plan(), budget_bytes=60, peak_bytes=50, plain_peak_bytes=90)
    measured = Rehearsed(peak_allocated_bytes=40, peak_reserved_bytes=55, stepped=True)
    fitted = Fitted(training, Applied(training), plan, measured)
    add_waiting(fitted, 100)
    assert (fitted.plan.budget_bytes, fitted.plan.peak_bytes, fitted.plan.plain_peak_bytes) == (160, 150, 190)
    assert fitted.measured == Rehearsed(peak_allocated_bytes=140, peak_reserved_bytes=155, stepped=True)
    fitted.undo()


def test_a_batch_s_share_is_its_parts_share() -> None:
    training = build_training(llama)
    training.sample, training.micro_batches = {"x": torch.zeros(4, 1)}, 2
    rows = parts_of(training, {"x": torch.zeros(4, 1)}, share=1 / 4)
    assert [float(part.weight) for part in rows] == [0.125, 0.125]
    training.weighting = "tokens"
    labels = torch.tensor([[1, 1], [1, 1], [1, -100], [-100, -100]])
    tokens = parts_of(training, {"labels": labels}, share=1 / 4)
    assert [float(part.weight) for part in tokens] == [0.2, 0.05]
