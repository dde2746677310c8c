"""Launches whose sizes are arrays: each comes out as it does alone."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tonnage.clock import kernels
from tonnage.clock.kernels.figures import distinct
from tonnage.clock.launch import Launch
from tonnage.hardware import find_gpu

SIZES = np.array([64, 4096, 64, 1000, 262_144])
KINDS = [
    Launch(kind="matmul", name="mm", shape=(1, SIZES, 4096, 2048), precision="bf16", variant="tn-16"),
    Launch(kind="matmul", name="addmm", shape=(8, 512, SIZES, 64), precision="fp32", variant="nn-16"),
    Launch(kind="attention", name="", shape=(2, 16, 4, SIZES, 512, 64, 64), precision="bf16", variant="flash forward"),
    Launch(kind="elementwise", name="silu", shape=(SIZES, 1), precision="bf16", moved_bytes=4.0 * SIZES, variant="vector"),
    Launch(kind="fused", name="fused_silu", shape=(SIZES, 1), moved_bytes=6.0 * SIZES, operations=3.0 * SIZES, variant="fused"),
    Launch(kind="reduction", name="sum", shape=(SIZES, 512, 1), moved_bytes=1024.0 * SIZES, variant="sum_last"),
    Launch(kind="norm", name="", shape=(SIZES * 512, SIZES), moved_bytes=2048.0 * SIZES, variant="layer_norm_narrow"),
    Launch(kind="optimizer", name="", shape=(SIZES, 1, SIZES), moved_bytes=28.0 * SIZES, variant="fused_wide"),
]  # fmt: skip


def alone(launch: Launch, at: int) -> Launch:
    def one(size: Any) -> Any:
        return size[at].item() if isinstance(size, np.ndarray) else size

    shape = tuple(map(one, launch.shape))
    return replace(launch, shape=shape, moved_bytes=one(launch.moved_bytes), operations=one(launch.operations))


@pytest.mark.parametrize("launch", KINDS, ids=lambda launch: f"{launch.kind} {launch.name}")
def test_many_launches_are_each_one_alone(launch: Launch) -> None:
    gpu = find_gpu("h200")
    together = kernels.seconds(launch, gpu)
    assert together == pytest.approx([kernels.seconds(alone(launch, at), gpu) for at in range(len(SIZES))])


def test_rows_that_are_alike_are_found() -> None:
    first, places = distinct([np.array([1, 2, 1, 2]), 7, np.array([5, 5, 5, 6])])
    assert sorted(first) == [0, 1, 3]
    assert places[0] == places[2] != places[1] != places[3]
