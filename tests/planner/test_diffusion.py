"""Plans of diffusion pipelines: what is chosen, and what is refused."""

import pytest

from questions.asking import answer
from tonnage.errors import BadLayout
from tonnage.hardware import find_cluster
from tonnage.models.diffusion import find_pipeline, size_of
from tonnage.planner.diffusion import ImageRequest, plan_images
from tonnage.report.plans.diffusion import plan_lines

GIB = 2**30


def test_each_way_to_offload_holds_less_than_the_one_before() -> None:
    ways = ("none", "model", "group", "sequential")
    plans = [answer(f"tonnage plan serve flux-dev --gpus h100 --offload {way}")["best"] for way in ways]
    sizes = [plan["total_bytes"] for plan in plans]
    assert sizes == sorted(sizes, reverse=True)
    assert plans[0]["host_bytes"] == 0
    assert plans[1]["host_bytes"] > 30 * 10**9
    assert plans[3]["seconds"] > plans[1]["seconds"] > plans[0]["seconds"]


def test_quantised_flux_fits_a_card_that_adapters_on_16_bits_do_not() -> None:
    wide = answer("tonnage plan train flux-dev --gpus rtx-4090 --lora 16")
    narrow = answer("tonnage plan train flux-dev --gpus rtx-4090 --lora 16 --base nf4")
    assert (wide["status"], narrow["status"]) == (1, 0)
    assert wide["best"]["total_bytes"] > 24 * GIB


def test_states_and_averages_are_counted() -> None:
    plain = answer("tonnage plan train sdxl --gpus h200 --micro-batch 1 --checkpoint full")["best"]
    eight = answer("tonnage plan train sdxl --gpus h200 --micro-batch 1 --checkpoint full --optimizer adamw-8bit")[
        "best"
    ]
    ema = answer("tonnage plan train sdxl --gpus h200 --micro-batch 1 --checkpoint full --ema")["best"]
    parameters = 2_567_463_684
    assert plain["total_bytes"] - eight["total_bytes"] == pytest.approx(6 * parameters, rel=0.01)
    assert ema["total_bytes"] - plain["total_bytes"] == 4 * parameters


def test_more_cards_train_more_images() -> None:
    one = answer("tonnage plan train sdxl --gpus h100 --lora 16 --micro-batch 4")["best"]
    eight = answer("tonnage plan train sdxl --gpus 8xh100 --lora 16 --micro-batch 4")["best"]
    assert 7 * one["images_per_s"] < eight["images_per_s"] <= 8 * one["images_per_s"]


def test_slices_bound_the_decoding_of_a_batch() -> None:
    batch = answer("tonnage plan serve sdxl --gpus h100 --offload model --batch 8")["best"]
    sliced = answer("tonnage plan serve sdxl --gpus h100 --offload model --batch 8 --vae-slicing")["best"]
    assert sliced["total_bytes"] < batch["total_bytes"] / 2


def test_guidance_doubles_the_passes() -> None:
    two = answer("tonnage plan serve wan-2.1-1.3b --gpus h100 --frames 17")["best"]["parts_s"]["denoiser"]
    one = answer("tonnage plan serve wan-2.1-1.3b --gpus h100 --frames 17 --no-guidance")["best"]["parts_s"]["denoiser"]
    assert two == pytest.approx(2 * one)


def test_a_host_too_small_for_what_waits_in_it_is_no_place_for_it() -> None:
    pipeline = find_pipeline("flux-dev")
    assert pipeline is not None
    request = ImageRequest(size=size_of(pipeline), steps=28, guided=False, offload="model")
    small = plan_images(pipeline, find_cluster("rtx-4090").with_host(memory_bytes=16 * GIB), request)
    assert not small.fits
    assert any("a host needs" in str(line) for line in plan_lines(small))


def test_memory_that_is_the_hosts_own_is_not_offloaded_to() -> None:
    found = answer("tonnage plan serve flux-dev --gpus m4-max")
    assert found["best"]["choices"]["offload"] == "none"
    assert not any(plan["choices"]["offload"] != "none" for plan in found["others"])


def test_all_of_flux_is_trained_in_bf16_unless_told() -> None:
    found = answer("tonnage plan train flux-dev --gpus h200")
    assert found["status"] == 0
    assert found["request"]["precision"] == "bf16"
    # Parameters, gradients and two states, of 2 bytes each.
    assert found["best"]["total_bytes"] > 8 * 11_901_408_320


@pytest.mark.parametrize(
    "words",
    [
        "plan train sdxl --gpus h100 --micro-batch 0",
        "plan train sdxl --gpus h100 --micro-batch 99999999",
        "plan train sdxl --gpus h100 --lora 0",
        "plan train sdxl --gpus h100 --lora 100000",
        "plan train sdxl --gpus h100 --base nf4",
        "plan train sdxl --gpus t4 --lora 16",
        "plan train sd3.5-large --gpus h100 --precision bf16 --checkpoint none",
        "plan serve sdxl --gpus h100 --batch -1",
        "plan serve sdxl --gpus h100 --steps 0",
        "plan serve flux-dev --gpus h100 --weights nf4 --offload sequential",
        "plan serve wan-2.1-14b --gpus h100 --vae-tiling",
        "plan serve sdxl --gpus h100 --frames 5",
        "plan serve sdxl --batch 0",
        "plan serve sdxl --gpus m4-max --offload model",
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(words: str) -> None:
    with pytest.raises(BadLayout) as refused:
        answer(f"tonnage {words}")
    assert refused.value.hint
