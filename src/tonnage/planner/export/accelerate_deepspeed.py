"""accelerate's YAML for DeepSpeed: processes and hosts; the rest is in DeepSpeed's own file, which it names."""

from typing import Any

from tonnage.planner.export import deepspeed
from tonnage.planner.export.accelerate_fsdp import cluster_settings
from tonnage.planner.export.launch import TrainingRun
from tonnage.planner.export.text import to_yaml

FILE = "accelerate_deepspeed.yaml"


def obstacles(launch: TrainingRun) -> list[str]:
    """Return the obstacles of DeepSpeed's file."""
    return deepspeed.obstacles(launch)


def notes(launch: TrainingRun) -> list[str]:
    """Return nothing: DeepSpeed's file has the notes."""
    return []


def render(launch: TrainingRun) -> str:
    """Return the file's text."""
    return to_yaml(settings(launch))


def settings(launch: TrainingRun) -> dict[str, Any]:
    """Return the file's settings. Precision is in DeepSpeed's file: accelerate refuses it in both."""
    machines = {key: value for key, value in cluster_settings(launch).items() if key != "mixed_precision"}
    return {**machines, "distributed_type": "DEEPSPEED", "deepspeed_config": _deepspeed(launch)}


def _deepspeed(launch: TrainingRun) -> dict[str, Any]:
    launcher = {"deepspeed_multinode_launcher": "standard"} if launch.cluster.hosts > 1 else {}
    return {
        "deepspeed_config_file": deepspeed.FILE,
        "zero3_init_flag": launch.configuration.zero == 3,
        **launcher,
    }
