"""llama.cpp: which layers lie where, and its buffers beside those that public logs print."""

from dataclasses import replace

import pytest

from tonnage.budget.serving.llama_cpp import MARGIN_BYTES, LlamaBudget, llama_budget
from tonnage.budget.serving.memory import ServingConfiguration
from tonnage.errors import BadLayout, RequestError
from tonnage.hardware import find_gpu
from tonnage.models import find_model
from tonnage.units import GIB, MIB

ASKED = ServingConfiguration(engine="llama.cpp", weights="q4_k_m", context=8192)


def placed(model: str, card: str, *, gpus: int = 1, host: int = 128 * GIB, **changed: object) -> LlamaBudget:
    return llama_budget(find_model(model), replace(ASKED, **changed), find_gpu(card), gpus=gpus, host_bytes=host)  # type: ignore[arg-type]


def test_buffers_of_llama_3_1_8b_as_they_are_logged() -> None:
    found = placed("llama-3.1-8b", "rtx-4090", engine_version="b4000")
    card = found.cards[0]
    assert (found.gpu_layers, found.layers) == (33, 33)
    assert card.weights / MIB == pytest.approx(4403.49, abs=0.1)
    assert found.host.weights / MIB == pytest.approx(281.81, abs=0.1)
    assert card.cache == 1024 * MIB
    assert card.compute / MIB == pytest.approx(258.5, abs=0.1)


def test_the_compute_buffer_by_build_and_attention() -> None:
    old, new = (placed("llama-3.1-8b", "rtx-4090", engine_version=build) for build in ("b9459", "b9460"))
    assert new.cards[0].compute < old.cards[0].compute  # logits of one slot, not of 512 tokens
    scores = placed("llama-3.1-8b", "rtx-4090", engine_version="b4000", flash_attention=False)
    assert scores.cards[0].compute / MIB == pytest.approx(560, abs=1)


def test_as_many_layers_as_fit_leave_a_gib() -> None:
    found = placed("llama-3.3-70b", "rtx-4090")
    assert 0 < found.gpu_layers < found.layers
    assert found.capacity_bytes - found.total_bytes >= MARGIN_BYTES
    more = placed("llama-3.3-70b", "rtx-4090", gpu_layers=found.gpu_layers + 1)
    assert more.capacity_bytes - more.total_bytes < MARGIN_BYTES
    both = found.cards[0].weights + found.host.weights
    assert both == pytest.approx(found.case.recipe.file_bytes, rel=1e-9)


def test_the_head_goes_first_since_b7467() -> None:
    new = placed("llama-3.1-8b", "rtx-4090", gpu_layers=1)
    old = placed("llama-3.1-8b", "rtx-4090", gpu_layers=1, engine_version="b7000")
    assert new.cards[0].weights == new.case.recipe.output_bytes
    assert old.cards[0].weights == old.case.layers[-1].total


def test_all_on_the_host() -> None:
    found = placed("llama-3.1-8b", "rtx-4090", gpu_layers=0)
    assert found.fits and found.total_bytes == 0
    assert found.host.weights == found.case.recipe.file_bytes


def test_experts_on_the_host() -> None:
    found = placed("gpt-oss-120b", "rtx-4090", weights="mxfp4", cpu_experts=36, context=32768)
    assert found.fits and found.gpu_layers == found.layers
    assert found.host.weights > 50 * GIB
    assert found.cards[0].weights < 3 * GIB


def test_windows_keep_their_window_where_llama_cpp_has_them() -> None:
    gemma = placed("gemma-3-27b", "h100", context=32768)
    one = 2 * 16 * 128 * 2
    assert gemma.cards[0].cache == (10 * 32768 + 52 * 1536) * one
    mistral = find_model("mistral-7b-v0.1")
    assert any(layer.attention and layer.attention.window for layer in mistral.decoder.layers)
    assert placed("mistral-7b-v0.1", "h100", context=32768).cards[0].cache == 32 * 32768 * 2 * 8 * 128 * 2


def test_a_quantized_cache() -> None:
    plain, eight, four = (placed("llama-3.1-8b", "h100", kv=kv).cards[0].cache for kv in ("fp16", "q8_0", "q4_0"))
    assert eight / plain == 34 / 64
    assert four / plain == 18 / 64


def test_latent_attention_keeps_one_vector() -> None:
    found = placed("deepseek-r1", "h200", gpus=8)
    assert sum(card.cache for card in found.cards) == 61 * 8192 * 576 * 2


def test_layers_are_split_over_cards() -> None:
    found = placed("llama-3.3-70b", "rtx-3090", gpus=2)
    assert [card.layers for card in found.cards] == [41, 40]
    assert found.total_bytes == max(card.total for card in found.cards)


def test_unified_memory_holds_the_embedding_too() -> None:
    found = placed("llama-3.1-8b", "m4-max", host=0)
    assert found.fits and found.gpu_layers == found.layers
    assert found.total_bytes > found.cards[0].total


def test_most_users_and_longest_context_are_the_edge() -> None:
    kv = placed("llama-3.1-8b", "rtx-4090", users=2).kv
    users, context = kv.most_users(8192), kv.longest_context(2)
    assert kv.holds(users, 8192) and not kv.holds(users + 1, 8192)
    assert kv.holds(2, context) and not kv.holds(2, context + 256)


def test_a_host_that_is_too_small() -> None:
    found = placed("llama-3.3-70b", "rtx-4090", host=16 * GIB)
    assert found.host_overflows and not found.fits


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"weights": "fp8"}, "reads no fp8"),
        ({"kv": "fp8"}, "keeps no fp8 cache"),
        ({"cpu_experts": 3}, "no experts"),
        ({"kv": "q8_0", "flash_attention": False}, "needs flash attention"),
        ({"shared_prefix": 100}, "share no prefix"),
        ({"tp": 2}, "by itself"),
        ({"engine_version": "new"}, "no build"),
    ],
)
def test_what_is_refused(changed: dict[str, object], said: str) -> None:
    with pytest.raises((RequestError, BadLayout), match=said):
        placed("llama-3.1-8b", "h100", **changed)
