"""What parts of pipelines hold, beside virtual runs, real cards and hand calculation."""

import json
from pathlib import Path

import pytest

from questions.asking import answer
from tonnage.budget.diffusion import _launch, all_weights, crossing_s, pass_seconds, passes
from tonnage.hardware import find_gpu
from tonnage.models.diffusion import Size

RESULTS = json.loads((Path(__file__).parents[2] / "benchmarks/results/diffusion.json").read_text())
GIB = 2**30


def test_enough_cases_were_held_out() -> None:
    assert len(RESULTS) >= 16
    assert {row["plan"].split()[1] for row in RESULTS} >= {"sd-1.5", "sdxl", "sd3-medium", "flux-dev", "wan-2.1-1.3b"}


@pytest.mark.parametrize("row", RESULTS, ids=lambda row: row["case"])
def test_plans_hold_what_real_modules_hold_on_a_virtual_gpu(row: dict[str, object]) -> None:
    planned = answer(f"tonnage plan {row['plan']} --gpus h200")["best"]["peak_allocated_bytes"]
    assert planned == pytest.approx(row["virtual_bytes"], rel=0.05)


@pytest.mark.parametrize(
    ("part", "size", "kept", "measured_gib"),
    # The peak of one forward on a real card: huggingface.co/datasets/diffusers/benchmarks, which calls GiB GB.
    [
        ("flux-dev", Size(1024, 1024), "bf16", 22.63),
        ("flux-dev", Size(1024, 1024), "nf4", 6.72),
        ("sdxl", Size(1024, 1024), "bf16", 5.05),
    ],
)
def test_a_forward_holds_what_a_real_card_was_seen_to_hold(
    part: str, size: Size, kept: str, measured_gib: float
) -> None:
    weights = all_weights()[part]
    held = weights.size_bytes(kept) + weights.widened_bytes(kept) + passes(part)["forward"].held_bytes(1, size)
    assert held / GIB == pytest.approx(measured_gib, rel=0.03)


def test_what_is_held_grows_with_batch_and_positions() -> None:
    way = passes("sdxl")["lora"]
    one, two = (way.held_bytes(batch, Size(1024, 1024), 16) for batch in (1, 2))
    wide = way.held_bytes(1, Size(2048, 1024), 16)
    assert one < two
    assert two == pytest.approx(wide, rel=0.05)  # text and time are small beside twice the pixels


def test_recomputing_keeps_less_and_ranks_cost() -> None:
    known = passes("flux-dev")
    size = Size(1024, 1024)
    assert known["lora-checkpoint"].held_bytes(1, size, 16) < known["lora"].held_bytes(1, size, 16) / 5
    assert known["lora"].held_bytes(1, size, 128) > known["lora"].held_bytes(1, size, 16)


def test_weights_are_counted_as_they_are_kept() -> None:
    flux = all_weights()["flux-dev"]
    assert flux.size_bytes("bf16") == 2 * flux.parameters
    assert flux.size_bytes("fp8") == pytest.approx(flux.parameters, rel=0.001)
    assert flux.size_bytes("nf4") == pytest.approx(flux.parameters * 0.5625, rel=0.001)
    assert flux.widened_bytes("bf16") == 0


IMAGE = Size(1024, 1024)


@pytest.mark.parametrize(
    ("part", "published", "tokens", "width", "layers"),
    # Operations of one forward without those of attention's scores: huggingface.co/datasets/diffusers/benchmarks.
    [("flux-dev", 59.52e12, 4096 + 512, 3072, 57)],
)
def test_operations_are_the_published_ones(part: str, published: float, tokens: int, width: int, layers: int) -> None:
    gpu = find_gpu("h200")
    rows = [row for row in passes(part)["forward"].launches if row[1] in ("matmul", "attention", "convolution")]
    found = sum(row[0] * _launch(row[1:], 1, IMAGE.positions, gpu.has_bf16).operations for row in rows)
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
