"""What a process holds beside its tensors."""

import pytest

from budget.decoders import llama
from tonnage.budget.configuration import Configuration
from tonnage.budget.loss import LOSS_CHUNKS, head_weights, loss_term
from tonnage.budget.overheads import context, fragmentation, nccl, workspace
from tonnage.budget.sharding import stages
from tonnage.hardware import find_gpu
from tonnage.models import from_config

MIB = 2**20


def test_workspaces_of_two_threads() -> None:
    assert workspace(find_gpu("h200")).size_bytes == 64 * MIB
    assert workspace(find_gpu("a100-80")).size_bytes == 2 * 8519680


def test_the_context_is_the_catalogue_s() -> None:
    overheads = find_gpu("h200").overheads
    known = sum(overheads[name].size_bytes for name in ("context", "kernels", "cudnn"))
    assert context(find_gpu("h200")).size_bytes == known + 2 * overheads["cublas"].size_bytes


@pytest.mark.parametrize(("choices", "count"), [({}, 0), ({"data": 8}, 1), ({"tp": 2, "pp": 2, "data": 2}, 3)])
def test_a_communicator_for_each_kind_of_parallelism(choices: dict[str, int], count: int) -> None:
    one = nccl(Configuration(data=2)).size_bytes
    assert nccl(Configuration(**choices)).size_bytes == count * one


def test_fragmentation_grows_with_the_loss_and_the_gradients() -> None:
    shape, configuration = llama(), Configuration(precision="bf16", seq=2048, micro_batch=2)
    (stage,) = stages(shape, configuration)
    found = fragmentation(shape, stage, configuration)
    assert found.size_bytes == pytest.approx(12 * 128256 * 4096 / 6 + 0.38 * 2 * shape.parameters)


def test_a_stage_without_the_head_has_no_hole_of_its_logits() -> None:
    shape, configuration = llama(), Configuration(precision="bf16", pp=2, accumulate=2)
    first, _ = stages(shape, configuration)
    assert fragmentation(shape, first, configuration).size_bytes == pytest.approx(0.38 * 2 * first.parameters)


def test_streams_of_fsdp_keep_their_own() -> None:
    shape = llama()
    choices = {"zero": 3, "data": 8, "shard": 8}
    with_streams, without = (Configuration(framework=framework, **choices) for framework in ("fsdp2", "deepspeed"))
    sizes = [fragmentation(shape, next(iter(stages(shape, each))), each).size_bytes for each in (with_streams, without)]
    outside = shape.embedding_parameters + shape.other_parameters
    assert sizes[0] - sizes[1] == pytest.approx((2 + 4) * outside)


@pytest.mark.parametrize(
    ("choices", "forward", "backward"),
    [
        ({"precision": "bf16"}, 2 + 4 + 4, 12),
        ({"precision": "fp32"}, 4 + 4, 12),
        ({"framework": "megatron"}, 2 + 4, 4 + 2),
        ({"framework": "nanotron"}, 4 + 4, 4 + 2),
        ({"precision": "bf16", "compile": True}, 2, 4),
        ({"precision": "bf16", "compile": True, "compile_loss": False}, 10, 12),
    ],
)
def test_bytes_of_a_logit(choices: dict[str, object], forward: int, backward: int) -> None:
    shape, configuration = llama(), Configuration(**choices)
    assert loss_term(shape, configuration, 1, "forward").size_bytes == forward * 128256
    assert loss_term(shape, configuration, 1, "loss").size_bytes == backward * 128256


def test_chunks_and_tensor_parallelism_divide_the_loss() -> None:
    whole = loss_term(llama(), Configuration(), 8, "loss").size_bytes
    assert loss_term(llama(), Configuration(loss="chunked", tp=2), 8, "loss").size_bytes == whole / LOSS_CHUNKS / 2


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
