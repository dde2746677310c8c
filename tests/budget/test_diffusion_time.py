"""Seconds of passes, beside operations counted elsewhere and published times."""

import pytest

from questions.asking import answer
from tonnage.budget.diffusion import passes
from tonnage.budget.diffusion_time import _launch, crossing_s, pass_seconds
from tonnage.hardware import find_gpu
from tonnage.models.diffusion import Size

IMAGE = Size(1024, 1024)


@pytest.mark.parametrize(
    ("part", "published", "tokens", "width", "layers"),
    # Operations of one forward without those of attention's scores: huggingface.co/datasets/diffusers/benchmarks.
    [("flux-dev", 59.52e12, 4096 + 512, 3072, 57)],
)
def test_operations_are_the_published_ones(part: str, published: float, tokens: int, width: int, layers: int) -> None:
    gpu = find_gpu("h200")
    rows = [row for row in passes(part)["forward"].launches if row[1] in ("matmul", "attention", "convolution")]
    found = sum(row[0] * _launch(row[1:], 1, IMAGE.positions, gpu).operations for row in rows)
    assert found == pytest.approx(published + layers * 4 * tokens**2 * width, rel=0.01)


def test_sdxl_takes_what_was_measured_on_an_a100() -> None:
    # PyTorch's blog "Accelerating Generative AI, part III": 30 steps at 1024² in BF16 with SDPA, before anything is compiled.
    low, high = answer("tonnage plan serve sdxl --gpus a100-80 --steps 30 --offload none")["best"]["range_s"]
    assert low < 3.31 < high


def test_a_backward_takes_about_twice_its_forward_and_less_where_weights_are_frozen() -> None:
    way, gpu = passes("flux-dev")["forward"], find_gpu("h100")
    forward, frozen, whole = (pass_seconds(way, 1, IMAGE, gpu, kind).card_s for kind in ("none", "inputs", "all"))
    assert 1.9 * forward < frozen < whole < 3.6 * forward
    again = pass_seconds(way, 1, IMAGE, gpu, "inputs", again=True).card_s
    assert frozen + forward < again < frozen + 1.5 * forward  # with its adapters, under autocast


def test_more_pixels_take_more_than_their_share() -> None:
    way, gpu = passes("flux-dev")["forward"], find_gpu("h100")
    assert pass_seconds(way, 1, Size(2048, 2048), gpu).card_s > 4 * pass_seconds(way, 1, IMAGE, gpu).card_s


def test_pinned_memory_crosses_faster() -> None:
    gpu = find_gpu("rtx-4090")
    assert crossing_s(2**30, gpu, pinned=True) < crossing_s(2**30, gpu, pinned=False)
