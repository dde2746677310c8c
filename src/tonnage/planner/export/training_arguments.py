"""Hugging Face `TrainingArguments` as JSON, for `HfArgumentParser.parse_json_file`. Written for transformers 5.

It includes sharding (`fsdp_config`, or the name of DeepSpeed's file), so that torchrun alone can launch it, and
recomputation of all blocks or none; `train.py` does the rest.
"""

from typing import Any

from tonnage.planner.export import accelerate, deepspeed
from tonnage.planner.export.launch import CLIP_NORM, LEARNING_RATE, TrainingRun, reasons

FILE = "training_arguments.json"
_OPTIMIZERS = {
    "sgd": "sgd",
    # They are equal without weight decay, which is what is written.
    "adam": "adamw_torch",
    "adamw": "adamw_torch",
    "adamw-8bit": "adamw_bnb_8bit",
    "adafactor": "adafactor",
    "lion": "lion_32bit",
}
_PAGED = {"adamw": "paged_adamw_32bit", "adamw-8bit": "paged_adamw_8bit", "lion": "paged_lion_32bit"}
_RECOMPUTE = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
_CHUNKED_LOSS = {
    "fused_linear_cross_entropy": True,
    "cross_entropy": False,
    "rope": False,
    "rms_norm": False,
    "swiglu": False,
}


def obstacles(launch: TrainingRun) -> list[str]:
    """Return what the file cannot express."""
    config, sizes = launch.configuration, launch.sizes
    by_trainer = launch.engine != "deepspeed"
    kernel = config.optimizer_kernel
    found = reasons(
        (sizes.tp > 1, "tensor parallelism is set where the model is loaded, not in TrainingArguments"),
        (sizes.cp > 1, "context parallelism is set in accelerate's file, not in TrainingArguments"),
        (sizes.pp > 1, "Trainer has no pipeline"),
        (sizes.ep > 1, "Trainer does not split experts"),
        (config.precision == "fp8", "TrainingArguments knows no FP8"),
        (config.activation_place != "gpu", "Trainer keeps activations on the GPU"),
        (by_trainer and config.optimizer not in _OPTIMIZERS, f"Trainer has no {config.optimizer}"),
        (config.step_in_backward, "Trainer updates when the backward pass is done"),
        (config.paged and config.optimizer not in _PAGED, f"Trainer has no paged {config.optimizer}"),
        (by_trainer and kernel == "loop", "Trainer's optimizers always run over many tensors at once"),
    )
    if launch.engine == "deepspeed":
        return found + deepspeed.obstacles(launch)
    if launch.engine == "fsdp2":
        hybrid = (launch.sizes.replicas > 1, "hybrid sharding is set in accelerate's file, not in TrainingArguments")
        return [*found, *accelerate.shared_obstacles(launch), *reasons(hybrid)]
    moved = (launch.offloaded, "Trainer moves states off the GPU only through FSDP2 or DeepSpeed")
    return found + reasons(moved)


def notes(launch: TrainingRun) -> list[str]:
    """Return how the file differs from the plan, and what it needs."""
    config = launch.configuration
    liger = f"the {'kernels are' if config.liger else 'loss is'} Liger's: pip install liger-kernel"
    bitsandbytes = (config.paged or config.optimizer in ("adamw-8bit", "lion")) and launch.engine != "deepspeed"
    tiles = "no argument tiles MLPs: ArcticTraining (`tiled_mlp_compute`) or DeepSpeed's `TiledMLP` does"
    return reasons(
        (_liger(launch) is not None, liger),
        (bitsandbytes, "the optimizer is bitsandbytes': pip install bitsandbytes"),
        (config.tiled_mlp, tiles),
        (config.dropout, "dropout is a field of the model's config.json, by another name in each model"),
    )


def settings(launch: TrainingRun) -> dict[str, Any]:
    """Return the file's settings. An optimizer in DeepSpeed's file takes precedence."""
    config, sizes = launch.configuration, launch.sizes
    optimizer = _OPTIMIZERS.get(config.optimizer, "adamw_torch")
    if config.paged:
        optimizer = _PAGED[config.optimizer]
    elif optimizer == "adamw_torch" and config.optimizer_kernel == "fused":
        optimizer = "adamw_torch_fused"
    # No precision is set if parameters have the compute dtype, in which `train.py` loads them.
    precision = {"bf16-mixed": "bf16", "fp16-mixed": "fp16", "tf32": "tf32"}.get(config.precision, "")
    if config.precision == "bf16" and launch.engine == "deepspeed":
        precision = "bf16"
    sharding: dict[str, Any] = {"deepspeed": deepspeed.FILE} if launch.engine == "deepspeed" else {}
    if launch.engine == "fsdp2":
        # The keys of accelerate's file that TrainingArguments accepts, without their prefix.
        fsdp = accelerate.settings(launch)["fsdp_config"]
        renamed = {key.removeprefix("fsdp_"): value for key, value in fsdp.items()}
        renamed["cpu_offload"] = renamed.pop("offload_params")
        del renamed["activation_checkpointing_offload"]
        sharding = {"fsdp": True, "fsdp_config": renamed}
    return {
        "output_dir": "output",
        "per_device_train_batch_size": sizes.micro_batch,
        "gradient_accumulation_steps": sizes.accumulate,
        "learning_rate": LEARNING_RATE,
        "weight_decay": 0.0,
        "max_grad_norm": CLIP_NORM,
        "optim": optimizer,
        **({precision: True} if precision else {}),
        **(_RECOMPUTE if config.checkpoint == "full" and launch.engine != "fsdp2" else {}),
        **sharding,
        **({"torch_compile": True} if config.compile else {}),
        **({} if _liger(launch) is None else {"use_liger_kernel": True, "liger_kernel_config": _liger(launch)}),
        "ddp_find_unused_parameters": False,
        "logging_steps": 1,
        "report_to": "none",
    }


def _liger(launch: TrainingRun) -> dict[str, bool] | None:
    fused = launch.configuration.loss != "full"
    if launch.configuration.liger:
        return dict.fromkeys(_CHUNKED_LOSS, True) | {"cross_entropy": False, "fused_linear_cross_entropy": fused}
    return dict(_CHUNKED_LOSS) if fused else None
