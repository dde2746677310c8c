"""transformers reads the arguments, alone and with DeepSpeed's file beside them, and builds the plugins from them."""

from typing import Any

import pytest

from exports import deepspeed, fsdp2, load_each, plan
from tonnage.planner.export import left_out, training_arguments

# TF32 and BF16 are refused where there is no GPU to have them.
PROGRAM = """
import transformers.training_args as training_args
from accelerate.utils import FullyShardedDataParallelPlugin
from transformers import HfArgumentParser, TrainingArguments

training_args.is_torch_tf32_available = training_args.is_torch_bf16_gpu_available = lambda: True

def load():
    (arguments,) = HfArgumentParser(TrainingArguments).parse_json_file("training_arguments.json")
    plugin = FullyShardedDataParallelPlugin(**arguments.fsdp_plugin_args) if arguments.fsdp_plugin_args else None
    return {
        "batch": [arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps],
        "precision": [arguments.bf16, arguments.fp16, arguments.tf32],
        "optimizer": arguments.optim.value,
        "recompute": arguments.gradient_checkpointing,
        "compile": arguments.torch_compile,
        "liger": arguments.liger_kernel_config if arguments.use_liger_kernel else None,
        "fsdp": plugin and [
            plugin.fsdp_version, plugin.reshard_after_forward, plugin.activation_checkpointing,
            type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy",
        ],
        "stage": arguments.deepspeed_plugin.zero_stage if arguments.deepspeed_plugin else None,
    }
"""
# DeepSpeed would compile collectives of its own for a CPU, which takes minutes.
NOTHING_COMPILED = """
import deepspeed.ops

deepspeed.ops.__compatible_ops__.update(dict.fromkeys(deepspeed.ops.__compatible_ops__, False))
"""
PLANS = {
    "alone": plan(gpus="h200", micro_batch=4, accumulate=8, checkpoint="full", precision="tf32"),
    "replicated": plan(optimizer="adafactor", precision="fp16-mixed"),
    "sharded": fsdp2(zero=3, checkpoint="full", optimizer_kernel="fused", compile=True),
    "kept": fsdp2(zero=2, checkpoint="every-2", precision="bf16", optimizer="adamw-8bit"),
    "offloaded": fsdp2(parameter_place="host", optimizer_place="host", loss="chunked", optimizer="lion"),
    "adapters": plan(gpus="h200", lora_rank=16, base="nf4", optimizer="sgd"),
}
WITH_DEEPSPEED = {
    "stage 3": deepspeed(checkpoint="full", micro_batch=2, accumulate=3),
    "stage 2 in bf16": deepspeed(zero=2, precision="bf16"),
    "stage 1": plan(zero=1, precision="fp16-mixed", optimizer="lion"),
}
# What torchrun tells one process: DeepSpeed looks for it.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return load_each(PROGRAM, PLANS, tmp_path_factory.mktemp("arguments"))


@pytest.mark.parametrize("name", PLANS)
def test_batches_survive(read: dict[str, Any], name: str) -> None:
    sizes = PLANS[name].sizes
    assert read[name]["batch"] == [sizes.micro_batch, sizes.accumulate]


def test_precision(read: dict[str, Any]) -> None:
    assert read["alone"]["precision"] == [False, False, True]
    assert read["replicated"]["precision"] == [False, True, None]
    assert read["sharded"]["precision"] == [True, False, None]
    assert read["kept"]["precision"] == [False, False, None], "the parameters themselves are in BF16"


def test_optimizers(read: dict[str, Any]) -> None:
    optimizers = {name: found["optimizer"] for name, found in read.items()}
    assert optimizers == {
        "alone": "adamw_torch",
        "replicated": "adafactor",
        "sharded": "adamw_torch_fused",
        "kept": "adamw_bnb_8bit",
        "offloaded": "lion_32bit",
        "adapters": "sgd",
    }


def test_sharding_and_recomputation(read: dict[str, Any]) -> None:
    assert read["alone"]["fsdp"] is read["replicated"]["fsdp"] is None
    assert read["sharded"]["fsdp"] == [2, True, True, False] and read["sharded"]["recompute"] is False
    assert read["kept"]["fsdp"] == [2, False, False, False]
    assert read["offloaded"]["fsdp"] == [2, True, False, True]
    assert read["alone"]["recompute"] is True


def test_compilation_and_loss(read: dict[str, Any]) -> None:
    assert [name for name, found in read.items() if found["compile"]] == ["sharded"]
    assert read["offloaded"]["liger"]["fused_linear_cross_entropy"] is True
    assert read["sharded"]["liger"] is None


def test_deepspeed_s_file_agrees_with_the_arguments(tmp_path: Any) -> None:
    """transformers compares the two and refuses a difference."""
    read = load_each(NOTHING_COMPILED + PROGRAM, WITH_DEEPSPEED, tmp_path, **ALONE)
    assert [found["stage"] for found in read.values()] == [3, 2, 1]
    assert read["stage 3"]["recompute"] is True
    assert read["stage 3"]["batch"] == [2, 3]
    assert read["stage 2 in bf16"]["precision"] == [True, False, None]


@pytest.mark.parametrize(
    ("launch", "reason"),
    [
        (fsdp2(tp=2), "tensor parallelism"),
        (fsdp2(cp=2), "context parallelism"),
        (fsdp2(pp=2), "pipeline"),
        (fsdp2(model="qwen3-30b-a3b", ep=2), "experts"),
        (fsdp2(precision="fp8"), "FP8"),
        (fsdp2(gpus="2x8xh100", shard=8), "hybrid"),
        (fsdp2(activation_place="host", checkpoint="full"), "activations"),
        (fsdp2(optimizer_place="host"), "together"),
        (plan(optimizer="muon"), "no muon"),
        (plan(optimizer_kernel="loop"), "many tensors at once"),
        (plan(gpus="h200", optimizer_place="host"), "only through FSDP2 or DeepSpeed"),
        (deepspeed(optimizer="adafactor"), "Adafactor"),
    ],
)
def test_what_it_cannot_say_is_left_out(launch: Any, reason: str) -> None:
    omitted = left_out(launch)
    assert reason in "; ".join(omitted["training_arguments.json"])
    assert omitted["train.py"] == ["it reads training_arguments.json, which is left out"]


def test_liger_kernels_are_named() -> None:
    kinds: tuple[dict[str, Any], ...] = ({"liger": True, "loss": "fused"}, {"loss": "fused"})
    every, loss = (training_arguments.settings(plan(gpus="h200", **kind))["liger_kernel_config"] for kind in kinds)
    assert every["rms_norm"] and every["fused_linear_cross_entropy"] and not every["cross_entropy"]
    assert loss["fused_linear_cross_entropy"] and not loss["rms_norm"]


def test_paged_states_are_bitsandbytes() -> None:
    assert (
        training_arguments.settings(plan(gpus="h200", optimizer="adamw-8bit", paged=True))["optim"]
        == "paged_adamw_8bit"
    )
    (reason,) = training_arguments.obstacles(plan(gpus="h200", step_in_backward=True))
    assert "when the backward pass is done" in reason
