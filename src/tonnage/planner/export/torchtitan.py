"""torchtitan's TOML: every parallelism at once, for the models that torchtitan includes.

Written for torchtitan 0.2.2, the last version that reads TOML; later ones are configured in Python.
"""

import tomllib
from pathlib import Path
from typing import Any

from tonnage.planner.export.launch import CLIP_NORM, LEARNING_RATE, TrainingRun, reasons

FILE = "torchtitan.toml"
MODULE = "torchtitan.train"
_DATA = Path(__file__).parent / "data" / "torchtitan.toml"
_OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW"}
_KERNELS = {"foreach": "foreach", "fused": "fused", "loop": "for-loop"}


def obstacles(launch: TrainingRun) -> list[str]:
    """Return what the file cannot express."""
    config, sizes = launch.configuration, launch.sizes
    split = sizes.tp > 1 or sizes.pp > 1
    unsharded = config.zero == 0 or sizes.shard * sizes.cp == 1
    steps_early = config.step_in_backward and launch.engine != "fsdp2"
    apart = config.parameter_place != config.optimizer_place
    megatron_keeps = config.framework == "megatron" and config.checkpoint == "selective"
    stage_1 = config.zero == 1 and config.framework != "fsdp2"
    return reasons(
        (flavor_of(launch) is None, f"torchtitan does not carry {launch.shape.name or launch.model}"),
        (config.optimizer not in _OPTIMIZERS, f"torchtitan has no {config.optimizer}"),
        (config.precision == "fp16-mixed", "torchtitan has no loss scaling for FP16"),
        (config.attention == "eager", "torchtitan's attention is fused"),
        (config.loss != "full", "torchtitan 0.2 computes the loss whole"),
        (config.paged, "torchtitan has no paged states"),
        (steps_early, "torchtitan steps in the backward pass with FSDP2 alone"),
        (config.liger, "torchtitan has no kernels of Liger's"),
        (config.tiled_mlp, "torchtitan has no tiled MLPs"),
        (config.dropout, "torchtitan's models have no dropout"),
        (config.lora_rank > 0, "torchtitan 0.2 has no adapters"),
        (config.activation_place != "gpu", "torchtitan keeps activations on the GPU"),
        (sizes.tp > 1 and not config.sequence_parallel, "torchtitan's norms are always split with tp"),
        (stage_1, "torchtitan does not shard optimizer states alone"),
        (unsharded and split and config.mixed, "without sharding, torchtitan computes split models in FP32"),
        (config.pp_chunks > 2, "torchtitan gives a rank two stages to interleave, unless every layer's place is told"),
        (config.zero == 0 and sizes.cp > 1, "torchtitan always shards over context parallelism"),
        ("nvme" in (config.parameter_place, config.optimizer_place), "torchtitan does not reach NVMe"),
        (apart, "torchtitan moves parameters and optimizer states to the host together or not at all"),
        (megatron_keeps, "torchtitan's selective recomputation keeps other tensors than Megatron's"),
    )


def notes(launch: TrainingRun) -> list[str]:
    """Return how the file differs from the plan, and what it needs."""
    config = launch.configuration
    counted = f"the plan counts {config.framework}'s memory; torchtitan's buffers and copies are its own"
    fp8 = (config.precision == "fp8", "FP8 needs torchao: pip install torchao")
    return reasons((config.framework not in ("fsdp2", "torch"), counted), fp8)


def settings(launch: TrainingRun) -> dict[str, Any]:
    """Return the file's settings."""
    config, found = launch.configuration, flavor_of(launch)
    assert found, "rendered in spite of an obstacle"
    name, flavor = found
    fp8 = {"converters": ["quantize.linear.float8"]} if config.precision == "fp8" else {}
    recompute = {"mode": config.checkpoint}
    if config.checkpoint == "selective":
        recompute["selective_ac_option"] = "op"
    elif config.checkpoint.startswith("every-"):
        recompute = {"mode": "selective", "selective_ac_option": config.checkpoint.removeprefix("every-")}
    # A pipeline splits its local batch; otherwise accumulation repeats it.
    sizes, plain = launch.sizes, config.precision in ("fp32", "tf32")
    training = {
        "local_batch_size": sizes.micro_batch * (sizes.accumulate if sizes.pp > 1 else 1),
        "global_batch_size": sizes.global_batch,
        "seq_len": sizes.seq,
        "max_norm": CLIP_NORM,
        "dtype": "bfloat16" if config.precision == "bf16" else "float32",
        "mixed_precision_param": "float32" if plain else "bfloat16",
        "enable_cpu_offload": launch.offloaded,
    }
    shard = sizes.shard if config.zero else 1
    parallelism = {
        "data_parallel_replicate_degree": sizes.data // shard,
        "data_parallel_shard_degree": shard,
        "fsdp_reshard_after_forward": "always" if config.zero == 3 else "never",
        "tensor_parallel_degree": sizes.tp,
        "context_parallel_degree": sizes.cp,
        "expert_parallel_degree": sizes.ep,
        "pipeline_parallel_degree": sizes.pp,
    }
    if sizes.pp > 1:
        parallelism["pipeline_parallel_schedule"] = "1F1B" if config.pp_chunks == 1 else "Interleaved1F1B"
        parallelism["pipeline_parallel_microbatch_size"] = sizes.micro_batch
    return {
        "job": {"description": f"{launch.model} as planned", "dump_folder": "output"},
        "model": {"name": name, "flavor": flavor, "hf_assets_path": "assets", **fp8},
        "optimizer": {
            "name": _OPTIMIZERS[config.optimizer],
            "lr": LEARNING_RATE,
            "implementation": _KERNELS[config.optimizer_kernel],
        },
        "training": training,
        "parallelism": parallelism,
        "activation_checkpoint": recompute,
        "compile": {"enable": config.compile} | ({} if config.compile_loss else {"components": ["model"]}),
    }


def flavor_of(launch: TrainingRun) -> tuple[str, str] | None:
    """Return torchtitan's name and flavor of this model; None if it has none."""
    for row in tomllib.loads(_DATA.read_text("utf-8"))["model"]:
        if row["architecture"] == launch.shape.architecture and str(launch.shape.parameters) in row["flavors"]:
            return row["name"], row["flavors"][str(launch.shape.parameters)]
    return None
