"""The serving report: 80 columns, what is said, and the keys of its JSON."""

import json
from dataclasses import replace

import pytest

from serving_shapes import LLAMA_8B, LLAMA_70B
from tonnage.budget.serving.memory import ServingConfiguration
from tonnage.hardware import find_cluster
from tonnage.models.shape import ModelShape
from tonnage.planner.serving.search import ServingPlan, plan_serving
from tonnage.report.plans.serving import launch_words, serving_figures, serving_lines

ASKED = ServingConfiguration(context=8192, users=16)


def plan(shape: ModelShape = LLAMA_8B, gpus: str = "4xh100", **changed: object) -> ServingPlan:
    return plan_serving(shape, find_cluster(gpus), replace(ASKED, **changed))  # type: ignore[arg-type]


def words(found: ServingPlan, *, explain: bool = False) -> str:
    return "\n".join(str(line) for line in serving_lines(found, explain=explain))


PLANS = [
    plan(),
    plan(LLAMA_70B, users=500),
    plan(LLAMA_70B, gpus="l4"),
    plan(engine="tonnage", kv="fp8"),
    plan(gpus="16xh100", users=2000, context=131072, weights="int4"),
]


@pytest.mark.parametrize("found", PLANS)
@pytest.mark.parametrize("explain", [False, True])
def test_at_home_in_80_columns(found: ServingPlan, explain: bool) -> None:
    lines = words(found, explain=explain).split("\n")
    assert max(map(len, lines)) <= 80
    assert not any(line != line.rstrip() for line in lines)


def test_a_plan_that_fits_ends_with_how_to_launch_it() -> None:
    text = words(plan())
    assert "fits" in text and "most users at 8,192 tokens" in text and "longest context for 16 users" in text
    assert text.rstrip().split("\n")[-4].strip() == "launch" or "launch" in text.split("\n\n")[-1]
    assert "vllm serve by-hand" in text


def test_a_plan_that_does_not_fit_says_what_is_missing_and_what_would() -> None:
    text = words(plan(LLAMA_70B, users=500))
    assert "does not fit" in text and "vllm serve" not in text
    for part in ("needed", "available", "largest: KV cache", "what would fit", "--users", "--context", "--gpus"):
        assert part in text


def test_explained_terms_sum_to_the_total() -> None:
    found = plan(gpus="h100")
    text = words(found, explain=True)
    for term in found.best.budget.terms:
        assert f"{int(term.size_bytes):,} B" in text
    assert "32 layers × 8 heads × (128 + 128) × 16 bits" in " ".join(text.split())


def test_the_keys_that_scripts_rely_on() -> None:
    found = plan(gpus="h100")
    figures = json.loads(json.dumps(serving_figures(found)))
    assert figures["fits"] is True
    kv = figures["kv"]
    assert kv["bytes_per_token"] == 131072
    assert kv["tokens"] == kv["blocks"] * 16
    assert kv["blocks"] == kv["available_bytes"] // (16 * 131072)
    assert kv["max_concurrency"] == pytest.approx(kv["tokens"] / 8192)
    ledger = dict(figures["ledger"])
    assert ledger.pop("total_bytes") == sum(ledger.values())
    assert figures["capacity_bytes"] > figures["ledger"]["total_bytes"]


def test_what_is_launched_is_what_was_planned() -> None:
    given = launch_words(plan(tp=1, weights="fp8", kv="fp8", eager=True, max_seqs=64, utilization=0.8))
    text = " ".join(given)
    for part in ("--max-num-seqs 64", "--gpu-memory-utilization 0.8", "--kv-cache-dtype fp8", "--quantization fp8"):
        assert part in text
    assert "--enforce-eager" in given
    assert launch_words(PLANS[3])[:2] == ["tonnage", "serve"]


def test_our_engine_is_launched_with_the_flags_that_give_the_same_blocks() -> None:
    from tonnage.commands.options import parser_of

    assert launch_words(plan(engine="tonnage", gpus="h100")) == (
        ["tonnage", "serve", "by-hand", "--budget", "0.9", "--context", "8192"]
    )
    words = launch_words(plan(engine="tonnage", gpus="h100", users=300, weights="int8", kv="fp8", block=32, eager=True))
    options = parser_of("serve").parse_args(words[2:])
    assert (options.max_seqs, options.weights, options.kv, options.block, options.eager) == (
        300,
        "int8",
        "fp8",
        32,
        True,
    )


def test_our_engine_is_offered_what_it_can_keep() -> None:
    found = plan(LLAMA_70B, gpus="h200", engine="tonnage")
    assert not found.fits and found.changes
    assert not any("int4" in change.flag for change in found.changes)
