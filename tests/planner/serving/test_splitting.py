"""What vLLM starts, what it does not, and where layers are cut."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.budget.serving.memory import ServingConfiguration, serving_budget, stage_budget
from tonnage.budget.serving.weights import even_counts, stages
from tonnage.errors import BadLayout
from tonnage.hardware import find_cluster
from tonnage.models import find_model
from tonnage.planner.serving.splitting import accepts, cut, splits

ASKED = ServingConfiguration(context=1024, users=2)
LLAMA_8B = find_model("llama-3.1-8b")


def refused(name: str, gpus: str, tp: int = 0, pp: int = 0) -> BadLayout:
    with pytest.raises(BadLayout) as caught:
        splits(find_model(name), find_cluster(gpus), ASKED, tp, pp)
    return caught.value


def test_heads_and_widths_and_words_must_split() -> None:
    assert accepts(LLAMA_8B, 8, 4)
    assert accepts(LLAMA_8B, 16, 1), "KV heads are repeated where ranks outnumber them"
    assert not accepts(LLAMA_8B, 3, 1) and not accepts(LLAMA_8B, 1, 33)
    mlp = LLAMA_8B.decoder.layers[0].feed_forward
    assert mlp is not None
    narrow = replace(LLAMA_8B.decoder.layers[0], feed_forward=replace(mlp, intermediate=14340))
    odd = replace(LLAMA_8B, stacks=(replace(LLAMA_8B.decoder, layers=(narrow,)),))
    assert accepts(odd, 4, 1) and not accepts(odd, 8, 1)


def test_refusals_say_what_does_not_split() -> None:
    assert "32 query and 8 KV heads" in str(refused("llama-3.1-8b", "3xh100", tp=3))
    assert "has only 32 layers" in str(refused("llama-3.1-8b", "64xh100", pp=64))
    assert "do not divide 8" in str(refused("llama-3.1-8b", "8xh100", tp=3))
    assert "3 copies would share hosts of 6 GPUs unevenly" in str(refused("llama-3.1-8b", "2x6xh100", tp=4, pp=1))
    assert "With --tp 4 no copy" in str(refused("mamba-codestral-7b", "2x6xh100", tp=4))
    assert "pipeline stages" in str(refused("mamba-codestral-7b", "2xh100", pp=2))


def test_a_vocabulary_is_padded_to_64_words() -> None:
    gpt2 = find_model("gpt2")
    assert [tp for tp in (1, 2, 3, 4, 6, 12) if accepts(gpt2, tp, 1)] == [1, 2, 3, 4, 6, 12]
    words = replace(gpt2, vocab=50257 + 64)
    assert not accepts(words, 3, 1)


@given(
    st.sampled_from(["8xh100", "2x6xh100", "3x4xh100", "4x8xh100", "h100"]), st.sampled_from(["llama-3.1-8b", "gpt2"])
)
def test_copies_lie_within_hosts_or_fill_them(gpus: str, name: str) -> None:
    cluster = find_cluster(gpus)
    for tp, pp in splits(find_model(name), cluster, ASKED, 0, 0):
        assert cluster.gpus % (tp * pp) == 0 and cluster.gpus_per_host % tp == 0
        assert cluster.gpus_per_host % (tp * pp) == 0 or tp * pp % cluster.gpus_per_host == 0


NAMES = st.sampled_from(["llama-3.1-70b", "qwen2.5-72b", "deepseek-v3", "gemma-3-27b", "qwen2.5-1.5b", "mixtral-8x7b"])


@given(NAMES, st.sampled_from([1, 2, 4]), st.integers(2, 16), st.sampled_from(["l4", "h100", "h200"]))
@settings(max_examples=60)
def test_no_cut_has_less_room_than_equal_stages(name: str, tp: int, pp: int, card: str) -> None:
    shape, gpu = find_model(name), find_cluster(card).gpu
    asked = replace(ASKED, tp=tp, pp=pp)
    even, found = serving_budget(shape, asked, gpu), cut(shape, asked, gpu)
    counts = found.configuration.stage_layers
    assert not counts or (sum(counts) == len(shape.decoder.layers) and min(counts) > 0 and len(counts) == pp)
    assert found.kv.tokens >= even.kv.tokens
    assert found.configuration == replace(even.configuration, stage_layers=counts)


def test_the_ends_get_fewer_layers_where_they_are_full() -> None:
    shape, gpu = find_model("qwen2.5-72b"), find_cluster("l4").gpu
    asked = replace(ASKED, pp=8)
    found = cut(shape, asked, gpu)
    counts = found.configuration.stage_layers
    assert even_counts(80, 8) == (10,) * 8
    assert counts[0] < 10 and counts[-1] < 10 and max(counts) == 11
    assert found.kv.tokens > 3 * serving_budget(shape, asked, gpu).kv.tokens


@pytest.mark.parametrize("counts", [(), (30, 34, 34, 28), (32, 32, 32, 30)])
def test_the_ledger_is_that_of_the_worst_stage(counts: tuple[int, ...]) -> None:
    shape, gpu = find_model("llama-3.1-405b"), find_cluster("h100").gpu
    budget = serving_budget(shape, replace(ASKED, tp=4, pp=4, stage_layers=counts), gpu)
    each = [stage_budget(shape, stage, budget.configuration, gpu) for stage in stages(shape, 4, counts)]
    assert budget.kv.blocks == min(stage.kv.blocks for stage in each)
    held = budget.kv.blocks
    assert all(held * one.kv.layout.bytes_per_block <= one.kv.available_bytes for one in each)


def test_where_nothing_fits_the_fullest_stage_is_shown() -> None:
    shape, gpu = find_model("llama-3.1-405b"), find_cluster("h100").gpu
    asked = replace(ASKED, tp=1, pp=8)
    budget = serving_budget(shape, asked, gpu)
    each = [stage_budget(shape, stage, budget.configuration, gpu).total_bytes for stage in stages(shape, 8)]
    assert budget.kv.blocks == 0 and budget.total_bytes == max(each)


@pytest.mark.parametrize("counts", [(16, 15), (16, 16, 0), (32,), (40, -8)])
def test_stages_that_are_none_are_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(BadLayout, match="do not cut the 32 layers"):
        serving_budget(LLAMA_8B, replace(ASKED, pp=2, stage_layers=counts), find_cluster("h100").gpu)
