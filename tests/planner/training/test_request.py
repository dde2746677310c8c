"""What cannot be is refused, in words that say what to write instead."""

from typing import Any

import pytest

from tonnage.errors import BadLayout
from tonnage.hardware import find_cluster
from tonnage.models import find_model
from tonnage.planner.training.request import (
    NO_OFFLOAD,
    Offload,
    TrainingRequest,
    check,
    divisors,
    for_checkpoint,
    for_cluster,
    parse_offload,
)


def refused(gpus: str = "8xh200", model: str = "llama-3.1-8b", **asked: Any) -> BadLayout:
    with pytest.raises(BadLayout) as caught:
        check(TrainingRequest(**{"seq": 4096} | asked), find_model(model), find_cluster(gpus))
    return caught.value


@pytest.mark.parametrize(
    ("asked", "said", "hint"),
    [
        ({"tp": 3}, "--tp 3 does not divide the 32 attention heads", "1, 2, 4, 8, 16, 32"),
        ({"tp": 4, "pp": 4}, "tp 4 × pp 4 = 16 does not divide 8 GPUs", "1, 2, 4, 8"),
        ({"pp": 64}, "llama-3.1-8b has 32 layers", "at most 32"),
        ({"pp_chunks": 2, "pp": 2}, "a framework that interleaves", "--framework megatron or fsdp2"),
        ({"pp_chunks": 2, "framework": "megatron"}, "divides the stages of a pipeline", "--pp 4"),
        ({"pp_chunks": 9, "pp": 4, "framework": "fsdp2"}, "llama-3.1-8b has 32 layers", "at most 8 chunks"),
        ({"bf16_gradients": True}, "--bf16-gradients is Megatron's", "--framework megatron"),
        ({"bf16_moments": True, "framework": "megatron"}, "a sharded Adam's", "--zero 1 --optimizer adamw"),
        ({"bf16_gradients": True, "framework": "megatron", "precision": "fp32"}, "an FP32 master", "bf16-mixed"),
        ({"cp": 3}, "--cp 3 does not divide --seq 4096", "divisor"),
        ({"ep": 2}, "has no experts", "Leave --ep out"),
        ({"global_batch": 12, "tp": 1, "pp": 1, "cp": 1}, "cannot be shared by 8 data-parallel ranks", "16"),
        ({"global_batch": 7, "micro_batch": 2}, "in micro-batches of 2", "8"),
        ({"micro_batch": 0}, "--micro-batch 0: there must be at least one", "--micro-batch 1"),
        ({"tp": -1}, "--tp -1", "--tp 1"),
        ({"seq": 0}, "--seq 0", "--seq 1"),
        ({"seq": 10**12}, "beyond anything that is trained", "16,777,216"),
        ({"checkpoint": "some"}, "--checkpoint some", "every-2"),
        ({"checkpoint": "every-0"}, "--checkpoint every-0", "every-2"),
        ({"lora_rank": 10**6}, "wider than llama-3.1-8b", "--lora 16"),
        ({"base": "nf4"}, "nothing is trained", "--lora 16"),
        ({"shard": 3}, "--shard 3 does not divide the 8 ranks", "1, 2, 4, 8"),
        ({"shard": 8, "tp": 2}, "--shard 8 does not divide the 4 ranks", "1, 2, 4"),
        ({"framework": "fsdp2", "zero": 0}, "--framework fsdp2 does not run ZeRO 0", "--zero 2, 3"),
    ],
)
def test_what_cannot_be_is_refused(asked: dict[str, Any], said: str, hint: str) -> None:
    error = refused(**asked)
    assert said in str(error)
    assert hint in error.hint


def test_experts_must_divide() -> None:
    assert "--ep 3 does not divide the 8 experts" in str(refused(model="mixtral-8x7b", ep=3))


def test_what_can_be_is_let_through() -> None:
    asked = TrainingRequest(seq=4096, tp=2, pp=2, cp=2, global_batch=3, checkpoint="every-3")
    check(asked, find_model("llama-3.1-8b"), find_cluster("8xh200"))


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("none", NO_OFFLOAD),
        ("optimizer", Offload(optimizer="host")),
        ("optimizer,parameters", Offload(optimizer="host", parameters="host")),
        ("optimizer:nvme, activations", Offload(optimizer="nvme", activations="host")),
        ("all", Offload("host", "host", "host")),
        ("all:nvme", Offload("nvme", "nvme", "nvme")),
    ],
)
def test_offload_is_read(text: str, places: Offload) -> None:
    assert parse_offload(text) == places
    assert parse_offload(places.words) == places


@pytest.mark.parametrize("text", ["", "gradients", "optimizer:disk", "optimizer,,"])
def test_other_offloads_are_refused(text: str) -> None:
    with pytest.raises(BadLayout, match="cannot be offloaded"):
        parse_offload(text)


def test_a_step_has_about_half_a_million_tokens_and_a_sequence_for_each_gpu() -> None:
    assert TrainingRequest(seq=8192).step_sequences(8) == 64
    assert TrainingRequest(seq=8192).step_sequences(1024) == 1024
    assert TrainingRequest(seq=8192).step_sequences(24) == 48
    assert TrainingRequest(seq=196).step_sequences(1) == 2048
    assert TrainingRequest(seq=8192, global_batch=10).step_sequences(8) == 10


def test_divisors_are_all_of_them() -> None:
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]
    assert all(divisors(number) == [k for k in range(1, number + 1) if number % k == 0] for number in range(1, 60))


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-7B-Instruct-AWQ", "unsloth/Qwen2.5-7B-Instruct-bnb-4bit"])
def test_weights_of_4_bits_are_a_base_for_adapters(model: str) -> None:
    shape = find_model(model)
    assert for_checkpoint(TrainingRequest(seq=4096, lora_rank=16), shape).base == "nf4"
    with pytest.raises(BadLayout) as caught:
        for_checkpoint(TrainingRequest(seq=4096), shape)
    assert "--lora 16" in caught.value.hint


@pytest.mark.parametrize("model", ["unsloth/Qwen2.5-7B-Instruct-GGUF", "someone/Qwen2.5-7B-Instruct-quantized.w8a8"])
def test_what_is_made_to_be_served_is_not_trained(model: str) -> None:
    with pytest.raises(BadLayout) as caught:
        for_checkpoint(TrainingRequest(seq=4096, lora_rank=16), find_model(model))
    assert "cannot be trained" in str(caught.value)
    assert "qwen2.5-7b" in caught.value.hint


@pytest.mark.parametrize("model", ["deepseek-v3", "gpt-oss-20b", "Qwen/Qwen3-8B-FP8"])
def test_weights_that_trainers_turn_back_are_trained(model: str) -> None:
    request = TrainingRequest(seq=4096)
    assert for_checkpoint(request, find_model(model)) is request


@pytest.mark.parametrize(("card", "precision"), [("t4", "fp16-mixed"), ("gtx-1080-ti", "fp32"), ("h200", "bf16-mixed")])
def test_bf16_is_not_assumed_where_a_card_has_none(card: str, precision: str) -> None:
    cluster = find_cluster(card)
    assert for_cluster(TrainingRequest(seq=4096), cluster).precision == precision
    assert "has no BF16" in str(refused("t4", precision="bf16"))


def test_nothing_is_offloaded_to_memory_that_is_the_card_s_own() -> None:
    assert for_cluster(TrainingRequest(seq=4096), find_cluster("m4-max")).offload == NO_OFFLOAD
    assert for_cluster(TrainingRequest(seq=4096), find_cluster("h200")).offload is None


def test_bf16_needs_a_card_that_has_it() -> None:
    assert "T4 has no BF16" in str(refused(gpus="t4"))
    check(TrainingRequest(seq=4096, precision="fp16-mixed"), find_model("llama-3.2-1b"), find_cluster("t4"))


def test_no_sequence_is_longer_than_a_model_has_positions_for() -> None:
    assert "has learned 1024 positions" in str(refused(model="gpt2"))
    assert "sees 197 tokens of every image" in str(refused(model="vit-large"))


def test_a_step_of_adapters_is_small() -> None:
    assert [TrainingRequest(seq=2048, lora_rank=16).step_sequences(gpus) for gpus in (1, 8, 24, 64)] == [32, 32, 24, 64]
