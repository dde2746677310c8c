"""What a process holds beside its tensors."""

import pytest

from budget.decoders import llama
from tonnage.budget.training.configuration import Configuration
from tonnage.budget.training.loss import LOSS_CHUNKS, head_weights, loss_term
from tonnage.budget.training.moments import moments
from tonnage.budget.training.overheads import context, fragmentation, nccl, other_streams, workspace
from tonnage.budget.training.states import stages
from tonnage.hardware import find_gpu
from tonnage.models import ModelShape, from_config

MIB = 2**20


def test_workspaces_of_two_threads() -> None:
    assert workspace(find_gpu("h200")).size_bytes == 64 * MIB
    assert workspace(find_gpu("b200")).size_bytes == 64 * MIB
    assert workspace(find_gpu("a100-80")).size_bytes == 2 * 8519680


def test_transformer_engine_has_a_workspace_of_its_own() -> None:
    assert workspace(find_gpu("h200"), "megatron").size_bytes == 96 * MIB
    assert workspace(find_gpu("a100-80"), "megatron").size_bytes == 2 * 8519680 + 4 * MIB


def test_logits_that_are_shifted_in_fp32_leave_larger_holes() -> None:
    """Of 12 bytes 2; of 16, the same and 4 of a gradient that is a token short."""
    both = (Configuration(precision="bf16", lora_rank=8, wide_logits=way, seq=512) for way in (False, True))
    plain, wide = (fragmentation(next(stages(llama(), each))).size_bytes for each in both)
    assert (plain, wide) == (pytest.approx(2 * 512 * 128256), pytest.approx(6 * 512 * 128256))


def test_the_context_is_the_catalogue_s() -> None:
    overheads = find_gpu("h200").overheads
    known = sum(overheads[name].size_bytes for name in ("context", "kernels", "cudnn"))
    assert context(find_gpu("h200")).size_bytes == known + 2 * overheads["cublas"].size_bytes


@pytest.mark.parametrize(
    ("choices", "count"),
    [
        ({}, 0),
        ({"data": 8}, 1),
        ({"tp": 2, "pp": 2, "data": 2}, 1 + 3),
        ({"zero": 3, "data": 8, "shard": 4}, 1 + 2),
        ({"zero": 3, "data": 8, "shard": 8, "tp": 2}, 1 + 2),
        ({"cp": 4}, 1),
        ({"data": 8, "ep": 4}, 1 + 1),
        ({"zero": 3, "data": 8, "shard": 8, "ep": 4}, 1 + 2),
    ],
)
def test_a_communicator_of_all_and_one_for_each_smaller_kind(choices: dict[str, int], count: int) -> None:
    one = nccl(Configuration(data=2)).size_bytes
    assert nccl(Configuration(**choices)).size_bytes == count * one


def test_fragmentation_grows_with_the_loss_and_the_gradients() -> None:
    shape, configuration = llama(), Configuration(precision="bf16", seq=2048, micro_batch=2)
    (stage,) = stages(shape, configuration)
    found = fragmentation(stage)
    assert found.size_bytes == pytest.approx(12 * 128256 * 4096 / 6 + 0.38 * 2 * shape.parameters)


def test_a_stage_without_the_head_has_no_hole_of_its_logits() -> None:
    shape, configuration = llama(), Configuration(precision="bf16", pp=2, accumulate=2)
    first, _ = stages(shape, configuration)
    assert fragmentation(first).size_bytes == pytest.approx(0.38 * 2 * first.parameters)


def kept_by_streams(shape: ModelShape, **choices: object) -> float:
    """Beyond what is alive at the peak."""
    configuration = Configuration(zero=3, data=2, shard=2, **choices)
    (stage,) = stages(shape, configuration)
    alive = [moment.terms for moment in moments(stage)]
    return sum(float(term.size_bytes) for term in other_streams(stage, alive))


def test_streams_of_fsdp_keep_shards_of_gradients_and_what_was_gathered() -> None:
    shape = llama()
    outside, block = shape.embedding_parameters + shape.other_parameters, shape.decoder.layers[0].parameters
    gathered = 2 * (outside + block / 2)
    # The loss is the peak, and no gradient is there.
    assert kept_by_streams(shape, framework="fsdp2", seq=32768) == pytest.approx(gathered + 4 * shape.parameters / 2)
    # All gradients are there, always: room for the sums of what is outside of blocks comes on top.
    assert kept_by_streams(shape, framework="fsdp2", accumulate=2) == pytest.approx(gathered + 4 * outside)
    assert kept_by_streams(shape, framework="deepspeed") == 0


@pytest.mark.parametrize(
    ("choices", "forward", "backward"),
    [
        ({"precision": "bf16"}, 2 + 4 + 4, 12),
        ({"precision": "fp32"}, 4 + 4, 12),
        ({"framework": "megatron"}, 2 + 4, 4 + 2),
        ({"framework": "nanotron"}, 4 + 4, 4 + 2),
        ({"precision": "bf16", "compile": True}, 2, 3 * 2),
        ({"precision": "bf16", "compile": True, "framework": "fsdp2"}, 2, 2 * 2),
        ({"precision": "bf16", "compile": True, "compile_loss": False}, 10, 12),
    ],
)
def test_bytes_of_a_logit(choices: dict[str, object], forward: int, backward: int) -> None:
    shape, configuration = llama(), Configuration(seq=1, **choices)
    assert loss_term(shape, configuration, "forward").size_bytes == forward * 128256
    assert loss_term(shape, configuration, "loss").size_bytes == backward * 128256


def test_chunks_and_tensor_parallelism_divide_the_loss() -> None:
    whole = loss_term(llama(), Configuration(seq=8), "loss").size_bytes
    split = loss_term(llama(), Configuration(loss="chunked", tp=2, seq=8), "loss").size_bytes
    # Split logits have a loss in Python, with one more copy of them.
    assert split == whole * 16 / 12 / LOSS_CHUNKS / 2
    own = loss_term(llama(), Configuration(framework="megatron", tp=2, seq=8), "loss").size_bytes
    assert own == loss_term(llama(), Configuration(framework="megatron", seq=8), "loss").size_bytes / 2


def test_the_head_may_be_narrower_than_the_model() -> None:
    opt = {
        "model_type": "opt",
        "hidden_size": 1024,
        "word_embed_proj_dim": 512,
        "num_hidden_layers": 2,
        "ffn_dim": 4096,
    }
    shape = from_config({**opt, "num_attention_heads": 16, "vocab_size": 50272, "do_layer_norm_before": False})
    assert head_weights(shape) < 50272 * 1024
