"""Pipelines and their sizes."""

import pytest

from tonnage.budget.diffusion import all_weights, passes
from tonnage.errors import BadLayout
from tonnage.models.diffusion import find_pipeline, pipelines, size_of


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("SDXL", "sdxl"),
        ("black-forest-labs/FLUX.1-dev", "flux-dev"),
        ("stabilityai/stable-diffusion-xl-base-1.0", "sdxl"),
        ("sd1.5", "sd-1.5"),
        ("Wan-AI/Wan2.1-T2V-14B-Diffusers", "wan-2.1-14b"),
    ],
)
def test_pipelines_are_found_by_the_names_that_people_use(name: str, found: str) -> None:
    pipeline = find_pipeline(name)
    assert pipeline is not None
    assert pipeline.name == found


def test_a_language_model_is_no_pipeline() -> None:
    assert find_pipeline("llama-3.1-8b") is None


def test_every_pipeline_has_weights_and_passes_for_all_its_parts() -> None:
    for pipeline in pipelines().values():
        for part in (pipeline.denoiser, *pipeline.text, pipeline.vae):
            assert all_weights()[part].parameters > 0
            assert passes(part)
        assert "forward" in passes(pipeline.denoiser)
        assert "lora-checkpoint" in passes(pipeline.denoiser)


def test_parameters_are_the_published_ones() -> None:
    millions = {name: round(row.parameters / 1e6) for name, row in all_weights().items()}
    published = {
        "sd-1.5": 860,
        "sdxl": 2567,
        "sd3-medium": 2028,
        "sd3.5-large": 8057,
        "flux-dev": 11901,
        "wan-2.1-1.3b": 1419,
    }
    published |= {"wan-2.1-14b": 14288, "vae-4": 84, "t5-xxl": 4762, "clip-l": 123, "clip-g": 695}
    assert {name: millions[name] for name in published} == published


def test_sizes_of_latents() -> None:
    wan, sdxl = find_pipeline("wan-14b"), find_pipeline("sdxl")
    assert wan is not None and sdxl is not None
    video = size_of(wan, "720x1280", 81)
    assert (video.latent_frames, video.area, video.positions) == (21, 90 * 160, 21 * 90 * 160)
    assert size_of(sdxl).positions == 128 * 128


@pytest.mark.parametrize("resolution", ["1000", "0", "-512", "512x", "99999999", "big", "1024x1024x2"])
def test_sizes_that_cannot_be_are_refused_with_what_to_write(resolution: str) -> None:
    pipeline = find_pipeline("sdxl")
    assert pipeline is not None
    with pytest.raises(BadLayout) as refused:
        size_of(pipeline, resolution)
    assert refused.value.hint


@pytest.mark.parametrize("frames", [0, -3, 80, 10**9])
def test_lengths_that_cannot_be_are_refused(frames: int) -> None:
    pipeline = find_pipeline("wan-1.3b")
    assert pipeline is not None
    with pytest.raises(BadLayout) as refused:
        size_of(pipeline, "", frames)
    assert "frames" in str(refused.value)
