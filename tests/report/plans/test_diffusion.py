"""The words of a diffusion plan."""

import pytest

from tonnage.hardware import find_cluster
from tonnage.models.diffusion import find_pipeline, size_of
from tonnage.planner.diffusion import DiffusionSearch, ImageRequest, plan_images
from tonnage.report.plans.diffusion import holder_lines, plan_figures, plan_lines, rate_words, reason


@pytest.fixture(scope="module")
def flux() -> DiffusionSearch:
    """Flux on a card that holds its denoiser alone."""
    pipeline = find_pipeline("flux-dev")
    assert pipeline is not None
    return plan_images(pipeline, find_cluster("rtx-4090"), ImageRequest(size=size_of(pipeline), steps=28, guided=False))


def test_the_report_says_what_fits_where_and_why(flux: DiffusionSearch) -> None:
    text = "\n".join(str(line) for line in plan_lines(flux, explain=True))
    for words in (
        "fits",
        "offload model",
        "an image",
        "host memory",
        "peak in the",
        "offload none",
        "term by term",
    ):
        assert words in text


def test_a_plan_that_needs_too_much_is_told_by_how_much(flux: DiffusionSearch) -> None:
    whole = next(plan for plan in flux.others if plan.choices["offload"] == "none")
    assert "too much" in reason(whole, flux.plan)
    slow = next(plan for plan in flux.others if plan.choices["offload"] == "sequential")
    assert "slower" in reason(slow, flux.plan)


def test_figures_sum_to_the_total(flux: DiffusionSearch) -> None:
    best = plan_figures(flux)["best"]
    assert sum(term["size_bytes"] for term in best["terms"]) == pytest.approx(best["total_bytes"], abs=8)
    assert best["range_s"][0] < best["seconds"] < best["range_s"][1]


def test_cards_that_cannot_are_named(flux: DiffusionSearch) -> None:
    lines = list(holder_lines(flux.pipeline, [(flux.cluster, flux), (find_cluster("t4"), None)], "1024×1024"))
    assert str(lines[-1]).strip() == "without BF16: t4"


@pytest.mark.parametrize(("rate", "words"), [(0.0376, "0.0376"), (12.34, "12.3"), (1234.5, "1,234")])
def test_rates_have_three_digits(rate: float, words: str) -> None:
    assert rate_words(rate) == words
