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
    configuration, sizes = launch.configuration, launch.sizes
    split = sizes.tp > 1 or sizes.pp > 1
    unsharded = configuration.zero == 0 or sizes.shard * sizes.cp == 1
    stage_1 = configuration.zero == 1 and configuration.framework != "fsdp2"
    return reasons(
        (flavor_of(launch) is None, f"torchtitan does not carry {launch.shape.name or launch.model}"),
        (configuration.optimizer not in _OPTIMIZERS, f"torchtitan has no {configuration.optimizer}"),
        (configuration.precision == "fp16-mixed", "torchtitan has no loss scaling for FP16"),
        (configuration.attention == "eager", "torchtitan's attention is fused"),
        (configuration.loss != "full", "torchtitan 0.2 computes the loss whole"),
        (configuration.paged, "torchtitan has no paged states"),
        (
            configuration.step_in_backward and launch.engine != "fsdp2",
            "torchtitan steps in the backward pass with FSDP2 alone",
        ),
        (configuration.liger, "torchtitan has no kernels of Liger's"),
        (configuration.tiled_mlp, "torchtitan has no tiled MLPs"),
        (configuration.dropout, "torchtitan's models have no dropout"),
        (configuration.lora_rank > 0, "torchtitan 0.2 has no adapters"),
        (configuration.activation_place != "gpu", "torchtitan keeps activations on the GPU"),
        (sizes.tp > 1 and not configuration.sequence_parallel, "torchtitan's norms are always split with tp"),
        (stage_1, "torchtitan does not shard optimizer states alone"),
        (unsharded and split and configuration.mixed, "without sharding, torchtitan computes split models in FP32"),
        (
            configuration.pp_chunks > 2,
            "torchtitan gives a rank two stages to interleave, unless every layer's place is told",
        ),
        (configuration.zero == 0 and sizes.cp > 1, "torchtitan always shards over context parallelism"),
        ("nvme" in (configuration.parameter_place, configuration.optimizer_place), "torchtitan does not reach NVMe"),
        (
            configuration.parameter_place != configuration.optimizer_place,
            "torchtitan moves parameters and optimizer states to the host together or not at all",
        ),
        (
            configuration.framework == "megatron" and configuration.checkpoint == "selective",
            "torchtitan's selective recomputation keeps other tensors than Megatron's",
        ),
    )


def notes(launch: TrainingRun) -> list[str]:
    """Return how the file differs from the plan, and what it needs."""
    configuration = launch.configuration
    return reasons(
        (
            configuration.framework not in ("fsdp2", "torch"),
            f"the plan counts {configuration.framework}'s memory; torchtitan's buffers and copies are its own",
        ),
        (configuration.precision == "fp8", "FP8 needs torchao: pip install torchao"),
    )


def settings(launch: TrainingRun) -> dict[str, Any]:
    """Return the file's settings."""
    configuration, found = launch.configuration, flavor_of(launch)
    assert found, "rendered in spite of an obstacle"
    name, flavor = found
    fp8 = {"converters": ["quantize.linear.float8"]} if configuration.precision == "fp8" else {}
    recompute = {"mode": configuration.checkpoint}
    if configuration.checkpoint == "selective":
        recompute["selective_ac_option"] = "op"
    elif configuration.checkpoint.startswith("every-"):
        every = configuration.checkpoint.removeprefix("every-")
        recompute = {"mode": "selective", "selective_ac_option": every}
    return {
        "job": {"description": f"{launch.model} as planned", "dump_folder": "output"},
        "model": {"name": name, "flavor": flavor, "hf_assets_path": "assets", **fp8},
        "optimizer": {
            "name": _OPTIMIZERS[configuration.optimizer],
            "lr": LEARNING_RATE,
            "implementation": _KERNELS[configuration.optimizer_kernel],
        },
        "training": _training(launch),
        "parallelism": _parallelism(launch),
        "activation_checkpoint": recompute,
        "compile": {"enable": configuration.compile}
        | ({} if configuration.compile_loss else {"components": ["model"]}),
    }


def flavor_of(launch: TrainingRun) -> tuple[str, str] | None:
    """Return torchtitan's name and flavor of this model; None if it has none."""
    for row in tomllib.loads(_DATA.read_text("utf-8"))["model"]:
        if row["architecture"] == launch.shape.architecture and str(launch.shape.parameters) in row["flavors"]:
            return row["name"], row["flavors"][str(launch.shape.parameters)]
    return None


def _training(launch: TrainingRun) -> dict[str, Any]:
    """Return the batch settings. A pipeline splits its local batch; otherwise accumulation repeats it."""
    configuration, sizes = launch.configuration, launch.sizes
    plain = configuration.precision in ("fp32", "tf32")
    return {
        "local_batch_size": sizes.micro_batch * (sizes.accumulate if sizes.pp > 1 else 1),
        "global_batch_size": sizes.global_batch,
        "seq_len": sizes.seq,
        "max_norm": CLIP_NORM,
        "dtype": "bfloat16" if configuration.precision == "bf16" else "float32",
        "mixed_precision_param": "float32" if plain else "bfloat16",
        "enable_cpu_offload": launch.offloaded,
    }


def _parallelism(launch: TrainingRun) -> dict[str, Any]:
    configuration, sizes = launch.configuration, launch.sizes
    shard = sizes.shard if configuration.zero else 1
    pipeline = {
        "pipeline_parallel_schedule": "1F1B" if configuration.pp_chunks == 1 else "Interleaved1F1B",
        "pipeline_parallel_microbatch_size": sizes.micro_batch,
    }
    return {
        "data_parallel_replicate_degree": sizes.data // shard,
        "data_parallel_shard_degree": shard,
        "fsdp_reshard_after_forward": "always" if configuration.zero == 3 else "never",
        "tensor_parallel_degree": sizes.tp,
        "context_parallel_degree": sizes.cp,
        "expert_parallel_degree": sizes.ep,
        "pipeline_parallel_degree": sizes.pp,
        **(pipeline if sizes.pp > 1 else {}),
    }
