"""DeepSpeed reads what is written for it, as it was meant."""

from typing import Any

import pytest

from exports import deepspeed, load_each, plan
from tonnage.planner.export import left_out

PROGRAM = """
from deepspeed.runtime.config import DeepSpeedConfig

def device(offload):
    return None if offload is None or offload.device == "none" else [offload.device, str(offload.nvme_path)]

def load():
    config = DeepSpeedConfig("deepspeed.json")
    zero = config.zero_config
    return {
        "micro": config.train_micro_batch_size_per_gpu,
        "accumulate": config.gradient_accumulation_steps,
        "clip": config.gradient_clipping,
        "stage": int(zero.stage),
        "optimizer": device(zero.offload_optimizer),
        "parameters": device(zero.offload_param),
        "bf16": config.bfloat16_config.enabled,
        "pure": config.bfloat16_config.bf16_master_weights_and_grads and config.bfloat16_config.bf16_optimizer_states,
        "fp16": config.float16_config.enabled,
        "name": config.optimizer_name,
        "kernel": config.optimizer_params and config.optimizer_params.get("torch_adam", False),
        "untested": config.zero_allow_untested_optimizer,
    }
"""
PLANS = {
    "stage 0": deepspeed(zero=0, micro_batch=4, accumulate=2),
    "stage 1": deepspeed(zero=1, optimizer_kernel="fused"),
    "stage 2 on the host": deepspeed(zero=2, optimizer_place="host"),
    "stage 3": deepspeed(precision="fp16-mixed", gpus="2x8xh100"),
    "stage 3 on nvme": deepspeed(optimizer_place="nvme", parameter_place="nvme"),
    "stage 3 in bf16": deepspeed(precision="bf16", parameter_place="host"),
    "fp32": deepspeed(precision="fp32", optimizer="momentum"),
    "lion": deepspeed(optimizer="lion"),
    "muon": deepspeed(optimizer="muon", zero=2),
    "8 bits": deepspeed(optimizer="adamw-8bit"),
}


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return load_each(PROGRAM, PLANS, tmp_path_factory.mktemp("deepspeed"))


@pytest.mark.parametrize("name", PLANS)
def test_numbers_survive(read: dict[str, Any], name: str) -> None:
    sizes, found = PLANS[name].sizes, read[name]
    assert (found["micro"], found["accumulate"], found["stage"]) == (
        sizes.micro_batch,
        sizes.accumulate,
        PLANS[name].configuration.zero,
    )
    assert found["clip"] == 1.0


def test_offload(read: dict[str, Any]) -> None:
    assert read["stage 2 on the host"]["optimizer"] == ["cpu", "None"]
    assert read["stage 2 on the host"]["parameters"] is None
    assert read["stage 3 on nvme"]["optimizer"] == read["stage 3 on nvme"]["parameters"] == ["nvme", "/local_nvme"]
    assert read["stage 3 in bf16"]["parameters"] == ["cpu", "None"]


def test_precision(read: dict[str, Any]) -> None:
    kinds = {name: (found["bf16"], found["pure"], found["fp16"]) for name, found in read.items()}
    assert kinds["stage 1"] == (True, False, False)
    assert kinds["stage 3"] == (False, False, True)
    assert kinds["stage 3 in bf16"] == (True, True, False)
    assert kinds["fp32"] == (False, False, False)


def test_optimizers(read: dict[str, Any]) -> None:
    assert read["stage 1"]["name"] == "adamw" and not read["stage 1"]["kernel"]
    assert read["stage 0"]["kernel"], "torch's own, where its foreach kernel was planned"
    assert not read["stage 2 on the host"]["kernel"], "only DeepSpeed's runs on the host"
    assert (read["lion"]["name"], read["muon"]["name"]) == ("lion", "muon")
    assert read["fp32"]["name"] == "SGD" and read["fp32"]["untested"]
    assert read["8 bits"]["name"] is None and read["8 bits"]["untested"]


@pytest.mark.parametrize(
    ("launch", "reason"),
    [
        (deepspeed(tp=2), "splits layers by rules of its own"),
        (deepspeed(cp=2), "no context parallelism"),
        (deepspeed(pp=2), "pipeline"),
        (deepspeed(model="qwen3-30b-a3b", ep=8), "experts"),
        (deepspeed(precision="fp8"), "FP8"),
        (deepspeed(optimizer="adafactor"), "Adafactor"),
        (deepspeed(zero=2, parameter_place="host"), "stage 3 only"),
        (deepspeed(zero=1, optimizer_place="nvme"), "NVMe in stage 3 only"),
        (deepspeed(zero=0, optimizer_place="host"), "from stage 1"),
        (deepspeed(gpus="2x8xh100", shard=8), "over all ranks"),
        (deepspeed(activation_place="host"), "activations"),
        (plan(framework="torch", precision="bf16"), "FP32 copies"),
    ],
)
def test_what_it_cannot_say_is_left_out(launch: Any, reason: str) -> None:
    omitted = left_out(launch)
    assert reason in "; ".join(omitted["deepspeed.json"])
    assert "accelerate_deepspeed.yaml" in omitted
