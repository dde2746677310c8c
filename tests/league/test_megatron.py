"""The league's source of Megatron's tests: every figure is counted, and plans of known layouts are close."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "league"))
from sources.megatron import SOURCE, kernel


def test_every_file_is_read_or_counted() -> None:
    reading = SOURCE.read()
    assert len(reading.rows) + reading.left_out.total() == 915
    assert len(reading.rows) >= 300
    assert len({row.name for row in reading.rows}) == len(reading.rows)


@pytest.mark.parametrize(
    "name",
    [
        "gpt/gpt3_mcore_te_tp1_pp1_dist_optimizer_no_mmap_bin_files dev_dgx_a100",
        "gpt/gpt3_mcore_te_tp1_pp4_vp1 lts_dgx_a100",
        "gpt/gpt3_mcore_tp1_pp4 dev_dgx_h100",
    ],
)
def test_plans_are_close(name: str) -> None:
    row = next(row for row in SOURCE.read().rows if row.name == name)
    assert SOURCE.predict(row).predicted == pytest.approx(row.measured, rel=0.015)


def test_the_old_container_has_no_deterministic_kernel() -> None:
    rows = [row for row in SOURCE.read().rows if row.case["settings"].get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == 0]
    kinds = {(row.case["date"] < "2025-11", "lts" in row.name, kernel(row)) for row in rows if "te_tp1_pp1" in row.name}
    assert (True, True, "eager") in kinds
    assert (True, False, "flash-2") in kinds
