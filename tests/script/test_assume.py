"""The values that a user gives for what a script reads."""

import subprocess
import sys

import pytest

import tonnage
from tonnage.script.assume import BadAssumption, assume, assume_lines, assumed_value, unused_lines


@pytest.fixture(autouse=True)
def _forget() -> None:
    assume_lines([])


def test_inside_a_block_its_values_hold_and_outside_none() -> None:
    assert assumed_value("train.py:1", is_flag=True) is None
    with assume(flag=False, number=0.5):
        assert assumed_value("train.py:1", is_flag=True) == 0.0
        with assume(number=2):
            assert assumed_value("train.py:1", is_flag=False) == 2.0
            assert assumed_value("train.py:1", is_flag=True) == 0.0
    assert assumed_value("train.py:1", is_flag=False) is None


def test_an_error_in_a_block_ends_it() -> None:
    with pytest.raises(KeyError), assume(flag=True):
        raise KeyError
    assert assumed_value("train.py:1", is_flag=True) is None


def test_lines_are_named_as_reports_name_them() -> None:
    assume_lines(["train.py:88=true", "src/loss.py:9=1e-3", "train.ipynb cell 3:2=false"])
    assert assumed_value("train.py:88", is_flag=True) == 1.0
    assert assumed_value("loss.py:9", is_flag=False) == 1e-3
    assert assumed_value("train.ipynb cell 3:2", is_flag=True) == 0.0
    assert assumed_value("train.py:8", is_flag=True) is None


def test_lines_at_which_nothing_was_read_are_known() -> None:
    assume_lines(["train.py:88=true", "train.py:9=2"])
    assumed_value("train.py:9", is_flag=False)
    assert unused_lines() == ["train.py:88"]


@pytest.mark.parametrize("words", ["train.py=1", "train.py:x=1", "=1", "train.py:8", "train.py:8=", "train.py:8=maybe"])
def test_what_names_no_line_or_value_is_refused(words: str) -> None:
    with pytest.raises(BadAssumption) as refused:
        assume_lines([words])
    assert "train.py:88=true" in refused.value.hint


@pytest.mark.parametrize("values", [{}, {"number": float("nan")}])
def test_a_block_without_a_value_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(BadAssumption), assume(**values):  # type: ignore[arg-type]
        pass


def test_it_is_public_and_needs_no_torch() -> None:
    assert tonnage.assume is assume
    code = "import sys, tonnage\nwith tonnage.assume(flag=True):\n    print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
