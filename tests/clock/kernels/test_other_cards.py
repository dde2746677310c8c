"""How figures of the card that was measured carry to others."""

import pytest
from pytest import approx

from tonnage.clock import kernels
from tonnage.clock.captured import CapturedCall
from tonnage.clock.kernels.figures import figures, measured, share_of_peak
from tonnage.clock.launch import Settings
from tonnage.hardware import find_gpu

H200, B200, A100, RTX = (find_gpu(name) for name in ("h200", "b200", "a100-80", "rtx-3090"))


def seconds(
    gpu: object, name: str, *shapes: tuple[int, ...], types: str = "c10::Half", values: tuple[str, ...] = ()
) -> float:
    call = CapturedCall(
        name=name, shapes=shapes, types=(types,) * len(shapes), values=values, devices=("cuda",) * len(shapes)
    )
    launch = kernels.launch_of(call, Settings())
    assert launch is not None
    return float(kernels.seconds(launch, gpu))  # type: ignore[arg-type]


def test_the_card_that_was_measured_is_as_it_was() -> None:
    assert measured() is H200
    assert share_of_peak(H200, "bf16", 0.3) == approx(0.3)


@pytest.mark.parametrize("share", [0.05, 0.3, 0.8])
def test_slower_tensor_cores_hide_more_of_what_is_beside_them(share: float) -> None:
    most = figures()["most_of_peak"]
    assert share < share_of_peak(A100, "bf16", share) <= share_of_peak(RTX, "bf16", share) <= most
    assert share_of_peak(B200, "bf16", share) == share  # kernels of its own


def test_a_norm_reaches_more_of_a_bandwidth_that_its_sms_can_fill() -> None:
    rows = (200_000, 768)
    moved = 2 * 4 * rows[0] * rows[1]
    of_h200, of_a100, of_rtx = (
        moved / seconds(gpu, "native_layer_norm", rows, (), (768,), (768,), types="float") / gpu.bandwidth_bytes_per_s
        for gpu in (H200, A100, RTX)
    )
    assert of_h200 < 0.6 < 0.65 < of_a100 <= 0.95
    assert 0.65 < of_rtx <= 0.95


def test_a_batch_norm_that_only_evaluates_makes_one_pass() -> None:
    image, channels = (256, 64, 56, 56), (64,)
    training, evaluating = (
        seconds(H200, "cudnn_batch_norm", image, *[channels] * 4, values=("",) * 5 + (flag,))
        for flag in ("True", "False")
    )
    assert evaluating < 0.7 * training
