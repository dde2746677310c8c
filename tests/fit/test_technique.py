"""Every technique by its name."""

import pytest

from tonnage.errors import RequestError
from tonnage.fit.technique import NAMES, find_conflict, make, technique_class
from tonnage.fit.techniques.host_states import HostStates
from tonnage.fit.techniques.micro_batches import MicroBatches
from tonnage.fit.techniques.recompute import Recompute
from tonnage.fit.techniques.step_in_backward import StepInBackward


@pytest.mark.parametrize("name", NAMES)
def test_a_technique_is_found_under_its_own_name(name: str) -> None:
    assert technique_class(name).name == name


def test_every_conflict_names_a_technique_that_exists() -> None:
    named = {other for name in NAMES for other in technique_class(name).conflicts}
    assert named <= set(NAMES)


def test_what_json_held_makes_the_same_technique() -> None:
    technique = Recompute(modes={"model.layers.0": "block"}, slices=2)
    assert make("recompute", technique.settings()) == technique


def test_an_unknown_name_or_setting_is_told_with_what_is_known() -> None:
    with pytest.raises(RequestError, match="recompte") as unknown:
        technique_class("recompte")
    assert "recompute" in unknown.value.hint
    with pytest.raises(RequestError, match="no setting 'pieces'"):
        make("recompute", {"modes": {}, "pieces": 2})


def test_a_conflict_is_told_with_its_reason() -> None:
    told = find_conflict([MicroBatches(count=2), StepInBackward()])
    assert told is not None
    assert "cannot stand together" in told
    assert find_conflict([MicroBatches(count=2)]) is None


def test_states_are_sent_to_the_host_once() -> None:
    told = find_conflict([HostStates(how="host"), HostStates(how="device")])
    assert told is not None
    assert "already" in told
