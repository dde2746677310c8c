"""How a model is divided among GPUs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from budget.decoders import llama
from tonnage.budget.training.configuration import Configuration
from tonnage.budget.training.states import stages
from tonnage.models import ModelShape
from tonnage.models.shape import AttentionShape, FeedForward, LayerShape, LayerStack

SHAPE = llama(tie_word_embeddings=False, num_hidden_layers=16)


def mixture(experts: int = 8) -> ModelShape:
    """A small mixture, by hand."""
    expert = 3 * 256 * 512
    layer = LayerShape(
        attention=AttentionShape(heads=4, kv_heads=4, head_dim=64, value_head_dim=64),
        feed_forward=FeedForward(intermediate=512, gated=True, experts=experts, experts_per_token=2),
        attention_parameters=4 * 256 * 256,
        feed_forward_parameters=experts * expert + 256 * experts,
        expert_parameters=expert,
        norm_parameters=512,
        rms_norm=True,
    )
    return ModelShape(
        name="mixture",
        architecture="mixtral",
        stacks=(LayerStack(layers=(layer,) * 4, hidden=256),),
        vocab=1000,
        tied=False,
        embedding_parameters=256_000,
        head_parameters=256_000,
    )


@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_interleaved_stages_keep_more_in_flight(pp: int, chunks: int) -> None:
    """On the first stage by (pp - 1) / (pp × chunks), as Megatron's paper says; the last one waits for all parts but its own."""
    first, last = stages(llama(num_hidden_layers=64), Configuration(pp=pp, pp_chunks=chunks, accumulate=4 * pp))
    assert first.in_flight == pytest.approx(pp * (1 + (pp - 1) / (pp * chunks)))
    assert last.in_flight == pytest.approx(((chunks - 1) * pp + 1) / chunks)
    assert first.share == pytest.approx(1 / pp)
    few, _ = stages(llama(num_hidden_layers=64), Configuration(pp=pp, pp_chunks=chunks, accumulate=pp))
    assert few.in_flight == pp


def test_stages_are_not_interleaved_without_a_pipeline() -> None:
    many = Configuration(pp=np.array([1, 4]), pp_chunks=2, accumulate=8)
    first, last = stages(SHAPE, many)
    assert np.asarray(first.in_flight).tolist() == [1, 5.5]
    assert np.asarray(last.in_flight).tolist() == [1, 2.5]


def test_one_gpu_holds_everything() -> None:
    (stage,) = stages(SHAPE, Configuration())
    assert stage.parameters == SHAPE.parameters
    assert (stage.embeds, stage.heads, stage.in_flight) == (1, 1, 1)


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_the_ends_of_a_pipeline(pp: int) -> None:
    first, last = stages(SHAPE, Configuration(pp=pp, accumulate=32))

    assert (first.embeds, first.heads, last.embeds, last.heads) == (1, 0, 0, 1)
    assert (first.in_flight, last.in_flight) == (pp, 1)
    assert first.dense == pytest.approx(SHAPE.decoder.parameters / pp)
    assert first.outside == 128256 * 2048
    assert last.outside == 128256 * 2048 + 2048


def test_a_short_step_fills_no_pipeline() -> None:
    first, _ = stages(SHAPE, Configuration(pp=8, accumulate=3))
    assert first.in_flight == 3


def test_both_ends_hold_what_they_tie() -> None:
    first, last = stages(llama(), Configuration(pp=2, accumulate=2))
    assert first.outside == last.outside - 2048 == 128256 * 2048


def test_tensor_parallelism_leaves_norms_whole() -> None:
    (stage,) = stages(SHAPE, Configuration(tp=4))
    norms = 16 * 2 * 2048
    assert stage.dense == pytest.approx((SHAPE.decoder.parameters - norms) / 4 + norms)


def test_experts_are_divided_by_expert_parallelism() -> None:
    (alone,) = stages(mixture(), Configuration(data=8))
    (spread,) = stages(mixture(), Configuration(data=8, ep=8))
    assert spread.experts == pytest.approx(alone.experts / 8)
    assert spread.dense == alone.dense


def test_an_expert_is_split_as_the_rest_until_its_gpus_are_used_up() -> None:
    assert Configuration(tp=4, data=2, ep=2).expert_tp == 4
    assert Configuration(tp=4, data=2, ep=8).expert_tp == 1
    assert Configuration(tp=4, data=8, shard=8, ep=8).expert_shards == 1


def test_many_configurations_at_once_are_each_as_alone() -> None:
    pp = np.array([1, 2, 4])
    ends = {stage.name: stage for stage in stages(SHAPE, Configuration(pp=pp, accumulate=np.array([4, 4, 4])))}
    for index, number in enumerate((1, 2, 4)):
        alone = next(stages(SHAPE, Configuration(pp=number, accumulate=4)))
        assert np.broadcast_to(ends["first stage"].parameters, 3)[index] == pytest.approx(alone.parameters)


@given(tp=st.sampled_from([1, 2, 4, 8]), pp=st.sampled_from([1, 2, 4]), ep=st.sampled_from([1, 2, 4]))
def test_no_stage_holds_more_than_the_model(tp: int, pp: int, ep: int) -> None:
    shape = mixture()
    for stage in stages(shape, Configuration(tp=tp, pp=pp, ep=ep, data=4)):
        assert stage.parameters <= shape.parameters + 1


def test_the_block_that_is_gathered() -> None:
    assert next(stages(SHAPE, Configuration())).largest_block == SHAPE.decoder.layers[0].parameters
    spread = next(stages(mixture(), Configuration(data=8, ep=8)))
    assert spread.largest_block < mixture().decoder.layers[0].parameters / 4


def test_nanotron_counts_the_head_as_layers() -> None:
    shape = llama(vocab_size=131072, num_key_value_heads=32)
    first, last = stages(shape, Configuration(framework="nanotron", pp=2, accumulate=2))
    assert (round(first.share * 16), round(last.share * 16)) == (11, 5)
