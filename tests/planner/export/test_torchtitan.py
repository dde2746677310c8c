"""torchtitan's own ConfigManager reads the TOML, and its ParallelDims takes the layout."""

import ast
from pathlib import Path
from typing import Any

import pytest

from exports import ENGINES, deepspeed, fsdp2, load_each, plan
from tonnage.models import find_model
from tonnage.planner.export import left_out, torchtitan
from tonnage.planner.export.torchtitan import flavor_of

# The package's own __init__ imports Triton kernels, which need a GPU's toolchain; its modules do not.
PROGRAM = """
import importlib.util, sys, types
package = types.ModuleType("torchtitan")
package.__path__ = importlib.util.find_spec("torchtitan").submodule_search_locations
sys.modules["torchtitan"] = package
from torchtitan.config import ConfigManager
from torchtitan.distributed.parallel_dims import ParallelDims

def load():
    config = ConfigManager().parse_args(["--job.config_file", "torchtitan.toml"])
    parallel = config.parallelism
    world = int(open("world").read())
    dims = ParallelDims(
        dp_replicate=parallel.data_parallel_replicate_degree, dp_shard=parallel.data_parallel_shard_degree,
        cp=parallel.context_parallel_degree, tp=parallel.tensor_parallel_degree, pp=parallel.pipeline_parallel_degree,
        ep=parallel.expert_parallel_degree, etp=parallel.expert_tensor_parallel_degree, world_size=world,
    )
    batch = config.training.local_batch_size * dims.dp_replicate * dims.dp_shard
    assert config.training.global_batch_size % batch == 0
    return {**config.to_dict(), "accumulate": config.training.global_batch_size // batch}
"""
PLANS = {
    "plain": fsdp2(accumulate=4, micro_batch=2, seq=8192),
    "kept": fsdp2(zero=2, checkpoint="every-3", optimizer_kernel="fused", precision="bf16"),
    "replicated": plan(checkpoint="full", precision="fp32", optimizer="adam", optimizer_kernel="loop"),
    "hybrid": fsdp2(gpus="2x8xh100", shard=8, precision="fp8", compile=True),
    "everything": fsdp2(
        model="llama-3.1-405b", gpus="16x8xh100", tp=8, pp=4, cp=2, accumulate=8, checkpoint="selective"
    ),
    "experts": fsdp2(model="qwen3-30b-a3b", ep=8, parameter_place="host", optimizer_place="host"),
}


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("torchtitan")
    for name, launch in PLANS.items():
        (folder / name).mkdir()
        (folder / name / "world").write_text(str(launch.cluster.gpus))
    return load_each(PROGRAM, PLANS, folder)


@pytest.mark.parametrize("name", PLANS)
def test_batches_and_layout(read: dict[str, Any], name: str) -> None:
    sizes, found = PLANS[name].sizes, read[name]
    assert found["training"]["seq_len"] == sizes.seq
    assert found["training"]["global_batch_size"] == sizes.global_batch
    assert found["accumulate"] == (1 if sizes.pp > 1 else sizes.accumulate)
    degrees = {axis: found["parallelism"][f"{axis}_parallel_degree"] for axis in ("tensor", "context", "pipeline")}
    assert degrees == {"tensor": sizes.tp, "context": sizes.cp, "pipeline": sizes.pp}


def test_sharding(read: dict[str, Any]) -> None:
    kinds = {
        name: [found["parallelism"][f"data_parallel_{kind}_degree"] for kind in ("replicate", "shard")]
        for name, found in read.items()
    }
    assert kinds["plain"] == [1, 8] and kinds["replicated"] == [8, 1] and kinds["hybrid"] == [2, 8]
    policies = {name: found["parallelism"]["fsdp_reshard_after_forward"] for name, found in read.items()}
    assert policies["plain"] == "always" and policies["kept"] == "never"
    assert read["everything"]["training"]["local_batch_size"] == 8
    assert read["everything"]["parallelism"]["pipeline_parallel_microbatch_size"] == 1
    assert read["experts"]["parallelism"]["expert_parallel_degree"] == 8
    assert read["experts"]["training"]["enable_cpu_offload"] is True


def test_precision_recomputation_and_optimizer(read: dict[str, Any]) -> None:
    dtypes = {
        name: (t["dtype"], t["mixed_precision_param"]) for name, t in ((n, f["training"]) for n, f in read.items())
    }
    assert dtypes["plain"] == ("float32", "bfloat16")
    assert dtypes["kept"] == ("bfloat16", "bfloat16")
    assert dtypes["replicated"] == ("float32", "float32")
    assert read["hybrid"]["model"]["converters"] == ["quantize.linear.float8"] and read["hybrid"]["compile"]["enable"]
    recompute = {name: found["activation_checkpoint"] for name, found in read.items()}
    assert (recompute["kept"]["mode"], recompute["kept"]["selective_ac_option"]) == ("selective", "3")
    assert recompute["everything"]["selective_ac_option"] == "op"
    assert (recompute["plain"]["mode"], recompute["replicated"]["mode"]) == ("none", "full")
    kernels = {name: (found["optimizer"]["name"], found["optimizer"]["implementation"]) for name, found in read.items()}
    assert kernels["kept"] == ("AdamW", "fused") and kernels["replicated"] == ("Adam", "for-loop")


@pytest.mark.parametrize(
    "model",
    "llama-3.1-8b llama-3.1-70b llama-3.1-405b qwen3-0.6b qwen3-1.7b qwen3-4b qwen3-8b qwen3-14b qwen3-32b "
    "qwen3-30b-a3b qwen3-235b-a22b deepseek-v2 deepseek-v2-lite deepseek-v3".split(),
)
def test_a_flavor_is_the_model_that_was_planned(model: str) -> None:
    found = flavor_of(plan(model=model))
    assert found
    shape, arguments = find_model(model), flavor_arguments(*found)
    assert arguments["n_layers"] == len(shape.decoder.layers)
    assert arguments["dim"] == shape.hidden
    assert arguments["n_heads"] == shape.decoder.layers[0].attention.heads  # type: ignore[union-attr]
    assert arguments.get("vocab_size", shape.vocab) == shape.vocab


def flavor_arguments(name: str, flavor: str) -> dict[str, Any]:
    """The plain numbers that torchtitan's source builds a flavor with."""
    tree = ast.parse((Path(ENGINES) / "torchtitan" / "models" / name / "__init__.py").read_text())
    pairs = [
        pair
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for pair in zip(node.keys, node.values, strict=True)
    ]
    (call,) = [value for key, value in pairs if isinstance(key, ast.Constant) and key.value == flavor]
    assert isinstance(call, ast.Call)
    return {word.arg: word.value.value for word in call.keywords if word.arg and isinstance(word.value, ast.Constant)}


@pytest.mark.parametrize(
    ("launch", "reason"),
    [
        (fsdp2(model="gpt2"), "does not carry gpt2"),
        (fsdp2(optimizer="lion"), "no lion"),
        (fsdp2(precision="fp16-mixed"), "FP16"),
        (fsdp2(attention="eager"), "fused"),
        (fsdp2(loss="chunked"), "whole"),
        (fsdp2(lora_rank=8), "adapters"),
        (fsdp2(activation_place="host", checkpoint="full"), "activations"),
        (fsdp2(optimizer_place="host"), "together"),
        (fsdp2(optimizer_place="nvme", parameter_place="nvme"), "NVMe"),
        (fsdp2(tp=2, sequence_parallel=False), "norms"),
        (plan(tp=8), "FP32"),
        (plan(cp=8, precision="fp32"), "always shards"),
        (deepspeed(zero=1), "alone"),
        (plan(framework="megatron", zero=2, tp=2, checkpoint="selective"), "Megatron's"),
    ],
)
def test_what_it_cannot_say_is_left_out(launch: Any, reason: str) -> None:
    assert reason in "; ".join(left_out(launch)["torchtitan.toml"])


def test_a_loss_that_is_not_compiled_is_left_out_of_the_components() -> None:
    way = {True: {"enable": True}, False: {"enable": True, "components": ["model"]}}
    for compiled, said in way.items():
        assert torchtitan.settings(fsdp2(compile=True, compile_loss=compiled))["compile"] == said


def test_what_its_models_do_not_have() -> None:
    assert any("tiled MLPs" in reason for reason in torchtitan.obstacles(fsdp2(tiled_mlp=True)))
    assert any("dropout" in reason for reason in torchtitan.obstacles(fsdp2(dropout=True)))
