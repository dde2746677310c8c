"""Techniques stand together, and any of them can be the only ones for a while."""

import pytest
import torch

from fit.cases import CASES, build_training
from tonnage.fit.applied import Applied
from tonnage.fit.technique import NotApplicable
from tonnage.fit.techniques.autocast import Autocast
from tonnage.fit.techniques.chunked_loss import ChunkedLoss
from tonnage.fit.techniques.fp8 import Fp8Linear
from tonnage.fit.techniques.recompute import Recompute
from tonnage.fit.techniques.step_in_backward import StepInBackward
from tonnage.fit.training import Training


def _training() -> Training:
    return build_training(CASES["llama"], dtype=torch.float32)


def _state(training: Training) -> tuple[list[str], int, object]:
    """Which modules have another forward, the contexts around a forward pass, and the stepper."""
    replaced = [name for name, module in training.model.named_modules() if "forward" in vars(module)]
    return replaced, len(training.forward_contexts), training.stepper


def test_all_are_applied_in_their_order_or_none() -> None:
    training = _training()
    before = _state(training)
    applied = Applied(training)
    with pytest.raises(NotApplicable) as caught:
        applied.add([Recompute.all(training.model), Fp8Linear(), Autocast()])  # no FP8 on a CPU
    assert caught.value.technique == "fp8"
    assert _state(training) == before and applied.techniques == () and training.applied == []
    applied.add([StepInBackward(), Autocast(), ChunkedLoss(), Recompute.all(training.model)])
    assert training.applied == ["chunked-loss", "recompute", "autocast", "step-in-backward"]
    assert [technique.name for technique in applied.on_model] == ["chunked-loss", "recompute", "autocast"]
    applied.take_away()
    assert _state(training) == before


@pytest.mark.parametrize("wanted", [(), ("autocast",), ("recompute",), ("chunked-loss", "autocast")])
def test_only_the_wanted_ones_change_the_model_for_a_while(wanted: tuple[str, ...]) -> None:
    training, alone = _training(), _training()
    techniques = [ChunkedLoss(), Recompute.all(training.model), Autocast()]
    Applied(alone).add([technique for technique in techniques if technique.name in wanted])
    applied = Applied(training)
    applied.add([*techniques, StepInBackward()])
    replaced, contexts, stepper = _state(training)
    with pytest.raises(ZeroDivisionError), applied.only(lambda technique: technique.name in wanted):
        assert _state(training)[:2] == _state(alone)[:2]
        assert training.stepper is stepper, "how a step is taken stays"
        raise ZeroDivisionError
    assert _state(training) == (replaced, contexts, stepper)
    applied.take_away()
    assert _state(training)[:2] == _state(_training())[:2]
