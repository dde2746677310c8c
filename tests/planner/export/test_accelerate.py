"""accelerate reads both of its files through its own launcher and plugins."""

from typing import Any

import pytest

from exports import deepspeed, fsdp2, load_each, plan
from tonnage.planner.export import left_out

# As `accelerate launch` does it: the file's values become arguments, those become an environment, and the plugins in
# the script's process read that.
LAUNCH = """
import os
import accelerate.utils.launch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

# FP8 is refused where torchao is not installed.
accelerate.utils.launch.is_fp8_available = lambda: True

def launched(name, prepare):
    config = load_config_from_file(name)
    words = ["--config_file", name, "--main_process_ip", "10.0.0.1", "--main_process_port", "0", "train.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    arguments.deepspeed_fields_from_accelerate_config = ",".join(config.deepspeed_config)
    environment = prepare(arguments)
    for key in [key for key in os.environ if key.startswith(("FSDP_", "PARALLELISM_", "ACCELERATE_"))]:
        del os.environ[key]
    os.environ.update(environment if isinstance(environment, dict) else environment[1])
    return config, arguments
"""
FSDP = (
    LAUNCH
    + """
def load():
    config, arguments = launched("accelerate_fsdp2.yaml", prepare_multi_gpu_env)
    plugin, sizes = FullyShardedDataParallelPlugin(), ParallelismConfig()
    return {
        "type": config.distributed_type.value,
        "machines": config.num_machines,
        "processes": arguments.nproc_per_node,
        "precision": os.environ["ACCELERATE_MIXED_PRECISION"],
        "fp8": os.environ.get("ACCELERATE_FP8_BACKEND"),
        "compiled": os.environ["ACCELERATE_DYNAMO_BACKEND"],
        "version": plugin.fsdp_version,
        "reshard": plugin.reshard_after_forward,
        "offload": type(plugin.cpu_offload).__name__,
        "recompute": [plugin.activation_checkpointing, plugin.activation_checkpointing_offload],
        "wrap": plugin.auto_wrap_policy.__name__,
        "state": plugin.state_dict_type.name,
        "parallel": os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG"),
        "sizes": [sizes.dp_replicate_size, sizes.dp_shard_size, sizes.tp_size, sizes.cp_size],
    }
"""
)
DEEPSPEED = (
    LAUNCH
    + """
from accelerate.utils import DeepSpeedPlugin

def load():
    config, arguments = launched("accelerate_deepspeed.yaml", prepare_deepspeed_cmd_env)
    plugin = DeepSpeedPlugin()
    return {
        "type": config.distributed_type.value,
        "processes": arguments.nproc_per_node,
        "stage": plugin.zero_stage,
        "init": plugin.zero3_init_flag,
        "micro": plugin.deepspeed_config["train_micro_batch_size_per_gpu"],
    }
"""
)
SHARDED = {
    "plain": fsdp2(),
    "kept": fsdp2(zero=2, precision="bf16", compile=True),
    "offloaded": fsdp2(parameter_place="host", optimizer_place="host", checkpoint="full"),
    "activations": fsdp2(checkpoint="full", activation_place="host", precision="fp16-mixed"),
    "hybrid": fsdp2(gpus="2x8xh100", shard=8),
    "split": fsdp2(gpus="2x8xh100", tp=4, cp=2),
    "fp8": fsdp2(precision="fp8"),
    "recomputed in part": fsdp2(checkpoint="every-2"),
}
ENGINE = {"stage 2": deepspeed(zero=2, micro_batch=2), "hosts": deepspeed(gpus="2x8xh100")}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return load_each(FSDP, SHARDED, tmp_path_factory.mktemp("fsdp2"))


@pytest.mark.parametrize("name", SHARDED)
def test_every_file_is_fsdp2_on_all_processes(sharded: dict[str, Any], name: str) -> None:
    found, cluster = sharded[name], SHARDED[name].cluster
    assert (found["type"], found["version"]) == ("FSDP", 2)
    assert (found["machines"], found["processes"]) == (cluster.hosts, str(cluster.gpus_per_host))
    assert (found["wrap"], found["state"]) == ("transformer_auto_wrap_policy", "SHARDED_STATE_DICT")


def test_stages_are_resharding(sharded: dict[str, Any]) -> None:
    assert sharded["plain"]["reshard"] is True
    assert sharded["kept"]["reshard"] is False


def test_precision_and_compilation(sharded: dict[str, Any]) -> None:
    assert (sharded["plain"]["precision"], sharded["plain"]["compiled"]) == ("bf16", "NO")
    assert (sharded["kept"]["precision"], sharded["kept"]["compiled"]) == ("no", "INDUCTOR")
    assert sharded["activations"]["precision"] == "fp16"
    assert (sharded["fp8"]["precision"], sharded["fp8"]["fp8"]) == ("fp8", "AO")


def test_offload_and_recomputation(sharded: dict[str, Any]) -> None:
    assert sharded["offloaded"]["offload"] == "CPUOffloadPolicy"
    assert sharded["plain"]["offload"] != "CPUOffloadPolicy"
    assert sharded["offloaded"]["recompute"] == [True, False]
    assert sharded["activations"]["recompute"] == [True, True]
    assert sharded["recomputed in part"]["recompute"] == [False, False]


def test_parallelism(sharded: dict[str, Any]) -> None:
    assert sharded["plain"]["parallel"] is None
    assert sharded["hybrid"]["sizes"] == [2, 8, 1, 1]
    assert sharded["split"]["sizes"] == [1, 2, 4, 2]


def test_deepspeed_s_file_is_found_through_accelerate_s(tmp_path: Any) -> None:
    read = load_each(DEEPSPEED, ENGINE, tmp_path)
    assert read["stage 2"] == {"type": "DEEPSPEED", "processes": "8", "stage": 2, "init": False, "micro": 2}
    assert read["hosts"] == {"type": "DEEPSPEED", "processes": "8", "stage": 3, "init": True, "micro": 1}


@pytest.mark.parametrize(
    ("launch", "reason"),
    [
        (plan(zero=0), "nothing is sharded"),
        (plan(zero=1), "optimizer states alone"),
        (fsdp2(gpus="h200"), "nothing to shard over"),
        (fsdp2(pp=2), "pipeline"),
        (fsdp2(model="qwen3-30b-a3b", ep=8), "experts"),
        (fsdp2(optimizer_place="host"), "together or not at all"),
        (fsdp2(optimizer_place="nvme", parameter_place="nvme"), "NVMe"),
        (fsdp2(activation_place="host"), "every block is recomputed"),
        (fsdp2(lora_rank=8, base="nf4"), "4-bit"),
    ],
)
def test_what_fsdp2_cannot_do_is_left_out(launch: Any, reason: str) -> None:
    assert reason in "; ".join(left_out(launch)["accelerate_fsdp2.yaml"])
