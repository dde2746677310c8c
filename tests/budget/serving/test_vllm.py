"""vLLM's rules by version, and its published start-ups."""

import pytest

from serving_shapes import LLAMA_8B, LLAMA_70B, attention, layer, model
from tonnage.budget.serving import vllm
from tonnage.budget.serving.memory import ServingBudget, ServingConfiguration, serving_budget
from tonnage.errors import RequestError
from tonnage.hardware import find_gpu
from tonnage.ledger import Category
from tonnage.models import find_model
from tonnage.models.shape import AttentionKind
from tonnage.units import GIB

H100 = find_gpu("h100")


def budget(version: str = "0.19.0", **options: object) -> ServingBudget:
    asked = ServingConfiguration(engine_version=version, **options)  # type: ignore[arg-type]
    return serving_budget(LLAMA_8B, asked, H100)


def test_versions_and_builds_of_others() -> None:
    assert vllm.find_release("0.11.2rc1+rhai0.cuda") == vllm.find_release("v0.11.2")
    assert vllm.find_release("99.0").generation == "V1"


@pytest.mark.parametrize("version", ["0.3.9", "banana", "", "V0"])
def test_unknown_versions(version: str) -> None:
    with pytest.raises(RequestError, match="version"):
        vllm.find_release(version)


def test_share_and_graphs_change_in_0_20() -> None:
    before, after = budget("0.19.1"), budget("0.20.0")
    assert (before.configuration.utilization, after.configuration.utilization) == (0.9, 0.92)
    graphs = next(int(term.size_bytes) for term in after.terms if term.name == vllm.GRAPHS)
    assert 0.7 * GIB < graphs < 1.1 * GIB
    # Before, graphs lie beyond the share; after, within.
    assert before.outside_bytes - after.outside_bytes == graphs
    gained = after.kv.available_bytes - before.kv.available_bytes
    assert gained == pytest.approx(0.02 * H100.memory_bytes - graphs, abs=2)


def test_defaults_by_card_and_version() -> None:
    found = {
        (card, version): (each.batched_tokens, each.max_seqs)
        for card in ("h100", "a100-80", "a100-40", "b200")
        for version in ("0.8.5", "0.19", "0.28")
        for each in [
            serving_budget(LLAMA_8B, ServingConfiguration(engine_version=version), find_gpu(card)).configuration
        ]
    }
    assert found["h100", "0.19"] == (8192, 1024)
    assert found["a100-80", "0.8.5"] == (8192, 1024)
    assert found["a100-80", "0.19"] == found["a100-40", "0.19"] == (2048, 256)
    assert (found["b200", "0.19"], found["b200", "0.28"]) == ((8192, 1024), (16384, 1024))


def test_v0_computes_a_whole_prompt() -> None:
    long, longer = budget("0.6.4", context=20000), budget("0.6.4", context=29000)
    assert (long.configuration.batched_tokens, long.configuration.max_seqs) == (20000, 256)
    activations = [each.ledger[Category.ACTIVATIONS] / GIB for each in (long, longer)]
    # What a log of this version says for this model on a 24-GiB card: 2.07 and 2.99.
    assert activations == pytest.approx([2.07, 2.99], abs=0.05)
    assert budget("0.6.4", context=100_000).configuration.batched_tokens == 2048


def test_v1_computes_in_chunks() -> None:
    assert budget(context=8192).kv == budget(context=32768).kv


@pytest.mark.parametrize(("version", "peak_gib"), [("0.16.0", 4.76), ("0.19.0", 1.89), ("0.21.0", 1.83)])
def test_the_sampler_decides_the_peak(version: str, peak_gib: float) -> None:
    assert budget(version).ledger[Category.ACTIVATIONS] / GIB == pytest.approx(peak_gib, abs=0.02)
    fewer = budget(version, max_seqs=128).ledger[Category.ACTIVATIONS]
    assert fewer < budget(version).ledger[Category.ACTIVATIONS]


def test_a_published_start_up_to_a_block_or_two() -> None:
    # Llama-3.1-8B on an H100 with 79.19 GiB, v0.19.0: 29,751 blocks, 476,016 tokens, 58.11 times 8192.
    found = budget(utilization=0.95).kv
    assert found.blocks == pytest.approx(29751, abs=10)
    assert found.tokens == found.blocks * 16
    assert found.max_concurrency(8192) == pytest.approx(58.11, abs=0.02)


def test_tensor_parallelism_over_nvlink_has_buffers() -> None:
    sizes = {
        (card, tp): serving_budget(
            LLAMA_70B, ServingConfiguration(engine_version="0.19", tp=tp, weights="fp8"), find_gpu(card)
        )
        for card in ("h100", "l40s")
        for tp in (1, 4)
    }
    outside = {key: _size(each, "outside of torch") / GIB for key, each in sizes.items()}
    assert outside["h100", 4] == pytest.approx(2.1)
    assert outside["h100", 1] == outside["l40s", 4] == pytest.approx(0.25)


def _size(found: ServingBudget, name: str) -> int:
    return next(int(term.size_bytes) for term in found.terms if term.name == name)


def test_buffers_of_experts_are_kept_from_0_13_on() -> None:
    shape = model([layer(attention(), 4096, 1024, experts=16)] * 4)
    kept, passing = (
        serving_budget(shape, ServingConfiguration(engine_version=version), H100).ledger[Category.ACTIVATIONS]
        for version in ("0.13", "0.12")
    )
    assert kept - passing == 8192 * 2 * (4096 + 4096) * 2


def test_windows_are_charged_in_full_before_0_10() -> None:
    window = layer(attention(kind=AttentionKind.SLIDING, window=1024))
    shape = model([window, window, window, layer(attention())] * 8)
    old, new = (
        serving_budget(shape, ServingConfiguration(engine_version=version, context=65536), H100).kv
        for version in ("0.9.2", "0.10.2")
    )
    assert (len(old.layout.groups), len(new.layout.groups)) == (1, 4)
    assert new.tokens == pytest.approx(old.tokens, rel=0.01)
    assert new.max_concurrency(65536) > 2.5 * old.max_concurrency(65536)


def test_eager_has_no_graphs() -> None:
    assert _size(budget(eager=True), vllm.GRAPHS) == 0
    assert budget("0.21", eager=True).kv.blocks > budget("0.21").kv.blocks


@pytest.mark.parametrize(
    ("model", "card", "logged_gib"),
    [
        ("gpt-oss-120b", "h100", 64.38),  # vLLM 0.14.1, "Using Triton backend"
        ("gpt-oss-120b", "a100-80", 65.9651),  # Marlin's
    ],
)
def test_mxfp4_experts_are_padded_as_their_kernel_wants_them(model: str, card: str, logged_gib: float) -> None:
    asked = ServingConfiguration(context=4096)
    terms = serving_budget(find_model(model), asked, find_gpu(card)).terms
    weights = sum(int(term.size_bytes) for term in terms if term.category is Category.PARAMETERS)
    assert weights / GIB == pytest.approx(logged_gib, rel=0.002)


def test_the_kernel_of_experts_goes_by_the_card() -> None:
    cards = ("a100-80", "rtx-4090", "h100", "b200", "rtx-5090", "mi300x")
    names = [vllm.expert_kernel(find_gpu(card)).name for card in cards]
    assert names == ["Marlin", "Marlin", "Triton", "FlashInfer", "Marlin", "Triton"]
