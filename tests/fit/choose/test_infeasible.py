"""What is said where nothing fits."""

import traceback
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from fit.choose.test_placement import HELD
from tonnage.fit.choose.infeasible import does_not_fit
from tonnage.units import GIB, MIB


def test_parameters_are_told_apart_from_what_else_is_on_the_card() -> None:
    held = replace(HELD, parameters_bytes=8 * MIB, besides_bytes=61 * MIB)
    error = does_not_fit(held, 40 * MIB, None, 0)
    assert str(error) == (
        "Nothing that keeps the gradients fits 40.00 MiB: parameters take 8.00 MiB, what else is on the card (the sample, "
        "library workspaces) 61.00 MiB, gradients 16.00 GiB, optimizer states 32.00 GiB."
    )
    assert held.held_bytes == 69 * MIB
    assert HELD.held_bytes == 16 * GIB


def test_python_s_traceback_names_the_smallest_budget_and_the_next_card() -> None:
    smallest: Any = SimpleNamespace(
        layout=SimpleNamespace(micro_batches=4, slices=1), placement=SimpleNamespace(name="plain")
    )
    error = does_not_fit(HELD, 40 * MIB, smallest, 60 * GIB)
    words = "".join(traceback.format_exception(error))
    assert "The smallest budget that would do is 60.00 GiB, with 4 micro-batches; the next card that has it is" in words
