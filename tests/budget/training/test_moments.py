"""When what is alive."""

from dataclasses import replace

import pytest

from budget.decoders import llama
from tonnage.budget.training.adapters import largest_matrix
from tonnage.budget.training.configuration import Configuration
from tonnage.budget.training.moments import moments, recomputed_blocks
from tonnage.budget.training.states import stages
from tonnage.models import ModelShape, find_model

HEAD = 128256 * 2048


def alive(shape: ModelShape, **choices: object) -> dict[str, dict[str, float]]:
    """Bytes by moment and name, on one GPU."""
    configuration = Configuration(**choices)
    (stage,) = stages(shape, configuration)
    return {moment.name: {term.name: float(term.size_bytes) for term in moment.terms} for moment in moments(stage)}


@pytest.mark.parametrize(
    ("checkpoint", "count", "expected"),
    [
        ("none", 32, 0),
        ("full", 32, 32),
        ("selective", 32, 32),
        ("every-2", 32, 16),
        ("every-3", 32, 11),
        ("every-1", 5, 5),
    ],
)
def test_blocks_that_are_recomputed(checkpoint: str, count: int, expected: int) -> None:
    assert recomputed_blocks(checkpoint, range(count)) == expected


@pytest.mark.parametrize("model", ["gpt-oss-120b", "gemma-2-9b"])
def test_layers_that_take_turns_are_recomputed_by_their_place_in_the_stack(model: str) -> None:
    """Kinds that alternate are runs of one block each, of which not every one is a first of K."""
    shape = find_model(model)
    some, full = (alive(shape, precision="bf16", checkpoint=way)["loss"] for way in ("every-4", "full"))
    assert some["kept by block inputs"] < full["kept by block inputs"] / 3
    assert some["kept by MLP"] > 20 * some["kept by block inputs"]


def test_gradients_live_through_the_forward_pass_only_where_they_accumulate() -> None:
    shape = llama()
    assert alive(shape)["forward"]["gradients"] == 0
    assert alive(shape, accumulate=2)["forward"]["gradients"] == 4 * shape.parameters
    assert alive(shape, keep_gradients=True)["loss"]["gradients"] == 4 * shape.parameters
    assert alive(shape, framework="megatron")["forward"]["gradients"] == 4 * shape.parameters


def test_a_pipeline_keeps_what_fsdp2_would_shard_until_its_last_micro_batch() -> None:
    shape = llama()
    for zero in (2, 3):
        choices = {"framework": "fsdp2", "zero": zero, "pp": 2, "data": 4, "shard": 4, "accumulate": 4}
        configuration = Configuration(**choices)  # type: ignore[arg-type]
        first, _ = stages(shape, configuration)
        found = {moment.name: {term.name: float(term.size_bytes) for term in moment.terms} for moment in moments(first)}
        held = "gradients until the last micro-batch"
        assert found["forward"][held] == found["embedding"][held] == pytest.approx(4 * first.parameters)
        assert found["forward"]["gradients"] == 0
        assert found["first block"]["gathered parameters"] == pytest.approx(2 * first.parameters)
        assert found["reduce"]["gradients on their way"] == 4 * first.outside
        assert found["optimizer"]["gradients"] == pytest.approx(first.parameters)
    assert held not in alive(shape, framework="fsdp2", zero=3, data=4, shard=4, accumulate=4)["forward"]
    assert found["loss"]["gathered parameters"] == 0


def test_an_interleaved_stage_holds_what_it_receives_and_what_it_sends() -> None:
    shape = llama()
    for chunks, buffers in ((1, 8 + 2), (2, 8 * 2 * 3)):  # and what two micro-batches in flight put out
        configuration = Configuration(framework="fsdp2", zero=2, pp=2, pp_chunks=chunks, data=2, shard=2, accumulate=8)
        first, _ = stages(shape, configuration)
        terms = {term.name: term.size_bytes for term in next(moments(first)).terms}
        assert terms["buffers of the stage"] == buffers * 2 * shape.hidden * 4096


def test_one_part_of_a_stage_is_reduced_before_the_next_where_there_is_one_round() -> None:
    shape = llama()
    sizes = {}
    for accumulate in (4, 8):
        configuration = Configuration(
            framework="fsdp2", zero=2, pp=4, pp_chunks=2, data=2, shard=2, accumulate=accumulate
        )
        first, _ = stages(shape, configuration)
        found = {moment.name: moment for moment in moments(first)}
        terms = {term.name: term.size_bytes for term in found["first block"].terms}
        sizes[accumulate] = terms["gradients until the last micro-batch"] / (4 * first.parameters)
    assert sizes == {4: pytest.approx(0.75), 8: pytest.approx(1)}


def test_megatron_copies_bf16_gradients_unless_its_optimizer_reads_them() -> None:
    shape = llama()
    choices = {"framework": "megatron", "zero": 1, "data": 4, "shard": 4, "optimizer_kernel": "fused"}
    plain, half, both = (
        alive(shape, **choices, **more)["optimizer"]
        for more in ({}, {"bf16_gradients": True}, {"bf16_gradients": True, "bf16_moments": True})
    )
    assert plain["gradients"] == 2 * half["gradients"] == 2 * both["gradients"] == 4 * shape.parameters
    assert half["FP32 copies of gradients"] == shape.parameters
    assert "FP32 copies of gradients" not in plain and "FP32 copies of gradients" not in both
    assert both["adamw states"] == half["adamw states"] / 2 == shape.parameters
    assert both["FP32 master copies"] == half["FP32 master copies"] / 2 == 2 * shape.parameters / 4


def test_no_gradient_is_there_while_a_pipeline_fills() -> None:
    shape = llama()
    for accumulate, expected in ((4, 0), (5, 1)):
        configuration = Configuration(pp=4, accumulate=accumulate)
        first, last = stages(shape, configuration)
        forward, of_last = (next(moments(stage)) for stage in (first, last))
        sizes = [{term.name: term.size_bytes for term in moment.terms} for moment in (forward, of_last)]
        assert sizes[0]["gradients"] == expected * 4 * first.parameters
        assert sizes[1]["gradients"] == 4 * last.parameters


def test_autocast_caches_weights_and_recomputation_lets_them_go() -> None:
    shape = llama()
    matrices = sum(layer.parameters for layer in shape.decoder.layers)
    kept, recomputed = alive(shape), alive(shape, checkpoint="full")
    name = "autocast copies of weights"

    assert kept["forward"][name] == kept["loss"][name] == 2 * (matrices + HEAD)
    assert recomputed["forward"][name] == 2 * (matrices + HEAD)
    assert recomputed["loss"][name] == 2 * HEAD
    assert name not in alive(shape, precision="bf16")["forward"]


def test_what_is_tied_adds_its_gradients_up() -> None:
    tied, apart = alive(llama(), precision="bf16"), alive(llama(tie_word_embeddings=False), precision="bf16")
    assert tied["embedding"]["the embedding's gradient"] == 2 * 2 * HEAD
    assert "the embedding's gradient" not in apart["embedding"]
    # Nor has the first block any of its own but that of the last matrix, as its MLP runs backward.
    layer = llama().decoder.layers[0].parameters
    own = 2 * (layer - largest_matrix(llama()))
    assert apart["embedding"]["gradients"] - apart["first block"]["gradients"] == pytest.approx(2 * HEAD + own)


def test_ranks_keep_buckets() -> None:
    shape = llama()
    assert alive(shape, data=8)["loss"]["DDP buckets"] == 4 * shape.parameters
    assert alive(shape, data=1)["loss"]["DDP buckets"] == 0
    assert alive(shape, data=8, framework="nanotron")["loss"]["DDP buckets"] == 2 * shape.parameters


def test_other_micro_batches_wait_while_one_goes_back() -> None:
    shape, configuration = llama(), Configuration(precision="bf16", pp=4, accumulate=8)
    first, last = stages(shape, configuration)
    kept = {
        stage.name: {
            moment.name: sum(float(term.size_bytes) for term in moment.terms if term.name.startswith("kept by"))
            for moment in moments(stage)
        }
        for stage in (first, last)
    }
    assert kept["first stage"]["first block"] == pytest.approx(3 / 4 * kept["first stage"]["backward"])
    assert kept["first stage"]["optimizer"] == kept["last stage"]["first block"] == 0


def test_sharded_parameters_are_gathered_by_the_block() -> None:
    shape = llama(tie_word_embeddings=False)
    found = alive(shape, framework="fsdp2", zero=3, data=8, shard=8)["backward"]
    block = shape.decoder.layers[0].parameters
    assert found["gathered parameters"] == 2 * (2 * block + 2 * HEAD + 2048)
    assert found["parameters"] == pytest.approx(4 * shape.parameters / 8)


def test_a_lesser_stage_of_fsdp_keeps_all_gathered() -> None:
    shape = llama()
    found = alive(shape, framework="fsdp2", zero=2, data=8, shard=8)["forward"]
    assert found["gathered parameters"] == pytest.approx(2 * shape.parameters)


def test_every_second_block_keeps_its_input_alone() -> None:
    shape = llama()
    none, half, full = (alive(shape, precision="bf16", checkpoint=way)["loss"] for way in ("none", "every-2", "full"))
    tokens = 4096
    assert half["kept by block inputs"] == 8 * 2 * 2048 * tokens
    assert half["kept by MLP"] == none["kept by MLP"] / 2
    assert "kept by MLP" not in full


def test_context_parallel_ranks_reduce_gradients_too() -> None:
    shape = llama()
    assert alive(shape, cp=2)["loss"]["DDP buckets"] == 4 * shape.parameters
    assert alive(shape, data=8, zero=1)["loss"]["DDP buckets"] == 4 * shape.parameters


def test_stages_of_torch_keep_a_buffer_for_every_micro_batch_and_the_logits() -> None:
    shape, configuration = llama(), Configuration(precision="bf16", pp=4, accumulate=8, seq=1024)
    first, last = (
        {moment.name: {term.name: term.size_bytes for term in moment.terms} for moment in moments(end)}
        for each in (configuration,)
        for end in stages(shape, each)
    )
    one = 2 * 2048 * 1024
    assert {moment["buffers of the stage"] for moment in last.values()} == {8 * one}
    assert {moment["buffers of the stage"] for moment in first.values()} == {(8 + 4) * one}  # and what it put out
    held = {name: moment.get("logits that the schedule holds") for name, moment in last.items()}
    assert held["forward"] is held["optimizer"] is None
    assert held["loss"] == held["first block"] == 2 * 128256 * 1024
    assert first["loss"]["logits that the schedule holds"] == 0
    own = alive_at_ends(shape, replace(configuration, framework="megatron"))
    assert not {"buffers of the stage", "logits that the schedule holds"} & own


def alive_at_ends(shape: ModelShape, configuration: Configuration) -> set[str]:
    """Names of everything that any stage holds at any moment."""
    return {term.name for end in stages(shape, configuration) for moment in moments(end) for term in moment.terms}


def test_adapters_are_as_wide_as_they_are_computed_with() -> None:
    kept = {
        framework: sum(
            size
            for name, size in alive(llama(), framework=framework, zero=zero, lora_rank=16)["loss"].items()
            if name.startswith("kept by")
        )
        for framework, zero in (("torch", 0), ("fsdp2", 3))
    }
    assert kept["torch"] > 1.2 * kept["fsdp2"]  # gathered in BF16, FSDP2's need no FP32 copy of what they read


def test_a_chunked_loss_sums_gradients_up() -> None:
    loss = alive(llama(), precision="bf16", loss="chunked")["loss"]
    assert loss["the head's gradient so far"] == 2 * HEAD
    assert loss["gradient of what the head reads"] == 2 * 2048 * 4096


def test_tensors_come_back_from_the_host_one_by_one() -> None:
    shape = llama()
    one_by_one = alive(shape, activation_place="host")["backward"]["one block"]
    by_block = alive(shape, framework="megatron", activation_place="host")["backward"]["one block"]
    assert one_by_one < by_block / 3


def test_a_split_embedding_has_a_gradient_of_all_rows() -> None:
    moments_of = alive(llama(tie_word_embeddings=False), precision="bf16", tp=4)
    assert moments_of["optimizer"]["other rows of the embedding's gradient"] == 2 * HEAD * 3 / 4
    sharded = alive(llama(), framework="fsdp2", zero=3, data=2, shard=2, tp=4)
    assert "other rows of the embedding's gradient" not in sharded["optimizer"]


def test_the_final_norm_is_through_before_the_blocks() -> None:
    found = alive(llama(), precision="bf16", checkpoint="full")
    assert found["head"]["kept by norms"] and "kept by norms" not in found["backward"]


def test_a_recomputed_block_has_its_input_beside_it() -> None:
    shape = llama()
    whole = alive(shape, precision="bf16")["first block"]["one block"]
    entry = 2 * 2048 * 4096
    assert alive(shape, precision="bf16", checkpoint="full")["first block"]["one block"] == whole + entry
    # Selective recomputation keeps every other product: the last one, which no gradient needs, is among them.
    assert alive(shape, precision="bf16", checkpoint="selective")["first block"]["one block"] == whole + 2 * entry


def test_fsdp2_gathers_the_next_block_while_it_reduces_the_last() -> None:
    shape = llama(tie_word_embeddings=False)
    found = alive(shape, framework="fsdp2", zero=3, data=4, shard=4, checkpoint="full")
    block = shape.decoder.layers[0].parameters
    first, second = found["first block"], found["second block"]
    assert second["gathered parameters"] - first["gathered parameters"] == 2 * block
    assert first["gradients"] - second["gradients"] == pytest.approx(4 * block / 4)
    assert second["gradients not yet reduced"] == 2 * HEAD + 4 * block
    assert second["kept by block inputs in the first block"] == 2 * 2048 * 4096
    assert found["loss"]["gathered parameters"] == first["gathered parameters"]
