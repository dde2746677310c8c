"""Ways of loading a model for training on several GPUs, as people write them: torchrun ways.py WAY FOLDER.

Each loads the checkpoint of a folder, hands the model to its engine and takes a step on a few tokens.
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

FOLDER = sys.argv[2]
LOCAL = int(os.environ.get("LOCAL_RANK", 0))
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
}
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}


def loaded(dtype: torch.dtype = torch.float32) -> Any:
    """The model as `from_pretrained` makes it."""
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=dtype)


def step(model: Any) -> None:
    """Forward, backward and an update."""
    tokens = torch.ones(1, 64, dtype=torch.int64, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()


def single() -> None:
    """One GPU, FP32."""
    step(loaded().cuda())


def ddp(dtype: torch.dtype = torch.float32) -> None:
    """Every rank loads, and DDP keeps them alike."""
    step(torch.nn.parallel.DistributedDataParallel(loaded(dtype).cuda(), device_ids=[LOCAL]))


def ddp_bf16() -> None:
    """The same in the type of the files."""
    ddp(torch.bfloat16)


def fsdp2(dtype: torch.dtype = torch.float32, precision: str = "bf16") -> None:
    """accelerate's FSDP2 with `cpu_ram_efficient_loading`."""
    os.environ |= FSDP2 | {"ACCELERATE_MIXED_PRECISION": precision}
    from accelerate import Accelerator

    accelerator, tokens = Accelerator(), torch.ones(1, 64, dtype=torch.int64, device="cuda")
    model = loaded(dtype)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()


def fsdp2_bf16() -> None:
    """The same in the type of the files."""
    fsdp2(torch.bfloat16, "no")


def fsdp_rank0() -> None:
    """PyTorch's first FSDP: rank 0 loads, the others build on the meta device, `sync_module_states`."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    if dist.get_rank() == 0:
        model, fill = loaded(), None
    else:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(FOLDER), dtype=torch.float32)

        def fill(module: Any) -> None:
            module.to_empty(device="cuda", recurse=False)

    step(
        FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}), device_id=LOCAL, sync_module_states=True,
            param_init_fn=fill, use_orig_params=True,
        )
    )  # fmt: skip


def deepspeed(stage: int) -> None:
    """DeepSpeed; at stage 3 under `zero.Init`, which transformers enters where it knows of the settings."""
    import deepspeed as engines
    from transformers.integrations import HfDeepSpeedConfig

    settings = DEEPSPEED | {"zero_optimization": {"stage": stage}}
    known = HfDeepSpeedConfig(settings)
    model = loaded()
    engine, *_ = engines.initialize(model=model, model_parameters=model.parameters(), config=settings)
    tokens = torch.ones(1, 64, dtype=torch.int64, device="cuda")
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    assert known


def zero2() -> None:
    """DeepSpeed below stage 3."""
    deepspeed(2)


def zero3() -> None:
    """DeepSpeed's stage 3."""
    deepspeed(3)


if __name__ == "__main__":
    torch.cuda.set_device(LOCAL)
    if "RANK" in os.environ:
        dist.init_process_group("nccl")
    globals()[sys.argv[1]]()
