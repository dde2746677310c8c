"""accelerate's YAML, written for accelerate 1.15: for FSDP2, with tensor and context parallelism beside it; for DeepSpeed.

The latter has processes and hosts, and names DeepSpeed's own file for the rest.
"""

from typing import Any

from tonnage.planner.export import deepspeed
from tonnage.planner.export.launch import TrainingRun, reasons

FSDP_FILE = "accelerate_fsdp2.yaml"
DEEPSPEED_FILE = "accelerate_deepspeed.yaml"
MIXED = {"fp16-mixed": "fp16", "bf16-mixed": "bf16", "fp8": "fp8"}


def obstacles(launch: TrainingRun) -> list[str]:
    """Return what the file cannot express."""
    config, sizes = launch.configuration, launch.sizes
    return [
        *reasons(
            (config.zero == 0, "nothing is sharded, and FSDP2 always shards"),
            (config.zero == 1 and config.framework != "fsdp2", "FSDP2 does not shard optimizer states alone"),
            (sizes.shard * sizes.cp == 1, "one rank keeps everything: there is nothing to shard over"),
            (sizes.pp > 1, "accelerate has no pipeline for training"),
            (sizes.ep > 1, "accelerate does not split experts"),
        ),
        *shared_obstacles(launch),
    ]


def shared_obstacles(launch: TrainingRun) -> list[str]:
    """Return what FSDP2 cannot do under any launcher."""
    config = launch.configuration
    together = config.parameter_place == config.optimizer_place
    moves_more = config.activation_place == "host" and config.checkpoint != "full"
    return reasons(
        ("nvme" in (config.parameter_place, config.optimizer_place), "FSDP2 does not reach NVMe"),
        (not together, "FSDP2 moves parameters and optimizer states to the host together or not at all"),
        (config.activation_place == "nvme", "FSDP2 does not reach NVMe"),
        (config.quantized_base, "bitsandbytes' 4-bit weights are not FSDP2's tensors"),
        (moves_more, "only inputs of recomputed blocks move to the host, where every block is recomputed"),
    )


def notes(launch: TrainingRun) -> list[str]:
    """Return how the file differs from the plan."""
    config = launch.configuration
    own_plan = "tensor parallelism follows the model's own plan; where that keeps norms whole, activations take more"
    counted = f"the plan counts {config.framework}'s memory; FSDP2's buffers and copies are its own"
    blocks = "which blocks are recomputed is for the script to say: it is not set here"
    return reasons(
        (launch.sizes.tp > 1 and config.sequence_parallel, own_plan),
        (config.framework not in ("fsdp2", "torch"), counted),
        (config.checkpoint not in ("none", "full"), blocks),
    )


def settings(launch: TrainingRun) -> dict[str, Any]:
    """Return the settings of FSDP2's file."""
    config, sizes = launch.configuration, launch.sizes
    degrees = {"dp_replicate": sizes.replicas, "dp_shard": sizes.shard, "tp": sizes.tp, "cp": sizes.cp}
    parallelism = {f"parallelism_config_{name}_size": size for name, size in degrees.items()}
    return {
        **cluster_settings(launch),
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": config.zero == 3,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_offload_params": launch.offloaded,
            "fsdp_activation_checkpointing": config.checkpoint == "full",
            "fsdp_activation_checkpointing_offload": config.activation_place == "host",
        },
        **({} if sizes.tp == sizes.cp == sizes.replicas == 1 else {"parallelism_config": parallelism}),
    }


def deepspeed_settings(launch: TrainingRun) -> dict[str, Any]:
    """Return the settings of DeepSpeed's file. Precision is in DeepSpeed's own: accelerate refuses it in both."""
    machines = {key: value for key, value in cluster_settings(launch).items() if key != "mixed_precision"}
    named = {"deepspeed_config_file": deepspeed.FILE, "zero3_init_flag": launch.configuration.zero == 3}
    named |= {"deepspeed_multinode_launcher": "standard"} if launch.cluster.hosts > 1 else {}
    return {**machines, "distributed_type": "DEEPSPEED", "deepspeed_config": named}


def cluster_settings(launch: TrainingRun) -> dict[str, Any]:
    """Return the machines and precision of every accelerate file. Rank and address are set at launch."""
    config, hosts = launch.configuration, launch.cluster.hosts
    fp8 = {"fp8_config": {"backend": "AO"}} if config.precision == "fp8" else {}
    compiled = {"dynamo_config": {"dynamo_backend": "INDUCTOR"}} if config.compile else {}
    return {
        "compute_environment": "LOCAL_MACHINE",
        "num_machines": hosts,
        "num_processes": launch.sizes.gpus,
        "machine_rank": 0,
        "rdzv_backend": "c10d" if hosts > 1 else "static",
        "mixed_precision": MIXED.get(config.precision, "no"),
        "use_cpu": False,
        **fp8,
        **compiled,
    }
