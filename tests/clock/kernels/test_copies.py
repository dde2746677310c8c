import pytest

from clock.kernels.calls import BF16, FP32, H200, SETTINGS, call
from tonnage.clock.kernels import copies


def test_a_transfer_takes_as_long_as_the_link_says() -> None:
    seconds = copies.seconds(copies.transfer(1e9, "to_device", pinned=True), H200)
    assert seconds == pytest.approx(1e9 / H200.pcie_bytes_per_s, rel=0.3)


def test_pageable_memory_is_slower() -> None:
    for direction in ("to_device", "to_host"):
        pinned, pageable = (copies.transfer(1e8, direction, pinned=pinned) for pinned in (True, False))
        assert copies.seconds(pageable, H200) > 3 * copies.seconds(pinned, H200)


def test_a_trace_names_the_direction() -> None:
    tensors = ((1024,), FP32), ((1024,), FP32)
    made = copies.OPERATORS["copy_"](call("copy_", *tensors, kernels=("Memcpy HtoD (Pinned -> Device)",)), SETTINGS)
    assert (made.variant, made.moved_bytes) == ("to_device_pinned", 4096)


def test_within_the_card_types_decide() -> None:
    wide, narrow = ((1024, 1024), FP32), ((1024, 1024), BF16)
    variants = [
        copies.OPERATORS["copy_"](call("copy_", *pair), SETTINGS).variant for pair in ((narrow, wide), (wide, narrow))
    ]
    assert variants == ["vector", "mixed"]
