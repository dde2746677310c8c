"""The native library of a CPU build of torch, loaded into a process that has torch already."""

import sys
from types import FrameType
from typing import Any

import torch

import tonnage


def python_rules(compute: Any) -> set[str]:
    """Torch's shape rules in Python that a computation runs."""
    ran: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "/torch/_refs/" in frame.f_code.co_filename:
            ran.add(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        compute()
    finally:
        sys.setprofile(None)
    return ran


def test_shapes_are_worked_out_in_cpp_although_torch_was_imported_before() -> None:
    with tonnage.virtual_gpu("h200"):
        rows, column = torch.ones(4, 3, device="cuda"), torch.ones(4, 1, device="cuda")
        assert python_rules(lambda: rows * column) == set()
        assert (rows * column).shape == (4, 3)


def test_tensors_without_a_device_keep_the_rules_of_torch() -> None:
    with tonnage.virtual_gpu("h200"):
        pass
    rows, column = torch.ones(4, 3, device="meta"), torch.ones(4, 1, device="meta")
    assert "mul" in python_rules(lambda: rows * column)
    assert (rows * column).shape == (4, 3)
