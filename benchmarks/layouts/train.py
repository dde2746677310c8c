"""Train a transformers model under torchrun in the parallel layout that its words name.

    torchrun --nproc-per-node 8 train.py --model llama.json --zero 3 --precision bf16-mixed --seq 2048 --micro-batch 2

The words are those of `tonnage plan train`, so that one request goes to both. Everything that is sharded, exchanged or
scheduled is torch.distributed's own: DDP, `fully_shard`, `parallelize_module`, pipeline schedules, `context_parallel`.
"""

import argparse
import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from experts import spread_experts
from offloading import HostAdamW, saved_on_host
from passes import ChunkedLoss, blocks_of, recompute
from pipeline import pipelined
from tensor_plan import split_tensors, splits_loss
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

STEPS = 2
SHARDED = 2  # the ZeRO stage from which FSDP2 does it


def words() -> argparse.Namespace:
    """As `tonnage plan train` takes them."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", required=True, help="a config.json")
    add("--precision", default="bf16-mixed", choices=["fp32", "bf16", "bf16-mixed"])
    add("--optimizer-kernel", default="fused", choices=["fused", "foreach"])
    add("--checkpoint", default="none", metavar="{none,selective,full,every-K}")
    add("--loss", default="full", choices=["full", "chunked"])
    add("--zero", type=int, default=0, choices=range(4))
    add("--offload", default="", help="some of optimizer, parameters, activations")
    add("--lora", type=int, metavar="RANK", help="train adapters")
    add("--no-sequence-parallel", action="store_true")
    add("--shard", type=int, help="ranks that share one copy, where not all do")
    for name in ("tp", "pp", "cp", "ep", "pp-chunks", "micro-batch"):
        add(f"--{name}", type=int, default=1)
    add("--global-batch", type=int, help="sequences in a step: more than one pass of all ranks accumulates")
    add("--seq", type=int, default=2048)
    options = parser.parse_args()
    if options.offload == "all":
        options.offload = "optimizer,parameters,activations"
    return options


def main() -> None:
    """Set up, train a few steps, say what it took."""
    options = words()
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "RANK" in os.environ:
        dist.init_process_group("nccl")
    model, step = build(options, mesh_of(options))
    optimizer = optimizer_of(model, options)
    for _ in range(STEPS):
        step()
        optimizer.step()
        optimizer.zero_grad()
    print(f"peak {torch.cuda.max_memory_allocated()}")
    if dist.is_initialized():
        dist.destroy_process_group()


def optimizer_of(model: nn.Module, options: argparse.Namespace) -> Any:
    """A group for DTensors and one for plain tensors: one call of a fused kernel takes no mixture."""
    fused = options.optimizer_kernel == "fused"
    settings = {"lr": 1e-4, "fused": fused, "foreach": not fused}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if "optimizer" in options.offload and not options.zero:
        return HostAdamW(model)
    if options.zero == 1:
        return ZeroRedundancyOptimizer(trained, torch.optim.AdamW, **settings)
    split = [parameter for parameter in trained if isinstance(parameter, DTensor)]
    whole = [parameter for parameter in trained if not isinstance(parameter, DTensor)]
    groups = [{"params": group} for group in (split, whole) if group]
    return torch.optim.AdamW(groups, **settings)


def mesh_of(options: argparse.Namespace) -> DeviceMesh | None:
    """Stages × copies × shards × parts of a sequence × parts of a matrix."""
    if not dist.is_initialized():
        return None
    data = dist.get_world_size() // (options.tp * options.pp * options.cp)
    shard = options.shard or data
    sizes = (options.pp, data // shard, shard, options.cp, options.tp)
    mesh = init_device_mesh("cuda", sizes, mesh_dim_names=("pp", "copies", "shard", "cp", "tp"))
    mesh["shard", "cp"]._flatten("shards")
    return mesh


def build(options: argparse.Namespace, mesh: DeviceMesh | None) -> tuple[nn.Module, Callable[[], None]]:
    """The model in its layout, and what runs forward and backward of one step."""
    config = AutoConfig.for_model(**json.loads(Path(options.model).read_text()), use_cache=False)
    narrow = options.precision == "bf16" or (options.precision == "bf16-mixed" and options.lora)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if narrow else torch.float32)
    recompute(model, options.checkpoint, offload="activations" in options.offload)
    if options.pp > 1:
        assert mesh is not None
        return pipelined(model, mesh, options, lambda stage: placed(stage, mesh, options, config))
    if options.ep > 1:
        spread_experts(model, mesh["shard"], options.ep)  # type: ignore[index]
    if options.tp > 1:
        split_tensors(model, mesh["tp"], sequence=not options.no_sequence_parallel)  # type: ignore[index]
    if options.cp > 1:
        causal_only(model)
    if options.lora:
        model = adapted(model, options)
    if options.loss == "chunked":
        model = ChunkedLoss(model)
    if options.zero >= SHARDED:
        shard_states(model, mesh, options)
    model = materialized(model, config, options)
    if options.zero < SHARDED and mesh is not None and mesh["shards"].size() > 1:
        return wrapped(model, mesh, options)
    return model, lambda: passes(model, mesh, options)


def adapted(model: nn.Module, options: argparse.Namespace) -> nn.Module:
    """LoRA by PEFT beside every linear layer but the head; adapters are as wide as the precision keeps parameters."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=options.lora, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.device("meta"):
        return get_peft_model(model, settings, autocast_adapter_dtype=options.precision != "bf16")


def placed(stage: nn.Module, mesh: DeviceMesh, options: argparse.Namespace, config: PretrainedConfig) -> nn.Module:
    """A stage of a pipeline on its card, split and sharded where that is asked for."""
    if options.tp > 1:
        split_tensors(stage, mesh["tp"], sequence=not options.no_sequence_parallel)
    if options.zero >= SHARDED:
        shard_states(stage, mesh, options)
    return materialized(stage, config, options)


def materialized(model: nn.Module, config: PretrainedConfig, options: argparse.Namespace) -> nn.Module:
    """From the meta device to where it lives, with weights and the rotary table."""
    model.to_empty(device="cpu" if offloads_shards(options) else "cuda")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_cuda:
                nn.init.normal_(parameter, std=0.02)
            else:
                parameter.zero_()
    for module in list(model.modules()):
        if hasattr(module, "rotary_emb"):
            module.rotary_emb = type(module.rotary_emb)(config).cuda()
    return model.train()


def offloads_shards(options: argparse.Namespace) -> bool:
    """FSDP2 moves parameters with their gradients and states, or nothing."""
    return options.zero >= SHARDED and "parameters" in options.offload


def shard_states(model: nn.Module, mesh: DeviceMesh | None, options: argparse.Namespace) -> None:
    """ZeRO-2 and ZeRO-3 by FSDP2, a unit for each block; experts that are spread have fewer copies to share."""
    assert mesh is not None
    policy = MixedPrecisionPolicy()
    if options.precision == "bf16-mixed":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    hybrid = mesh["copies"].size() > 1
    over = mesh["copies", "shard"] if hybrid else mesh["shards"]
    offload = CPUOffloadPolicy() if offloads_shards(options) else OffloadPolicy()
    settings = {"mp_policy": policy, "reshard_after_forward": options.zero == 3, "offload_policy": offload}
    for block in blocks_of(model):
        if options.ep > 1:
            fully_shard(block.mlp.experts, mesh=block.mlp.experts.copies, **settings)
        fully_shard(block, mesh=over, **settings)
    fully_shard(model, mesh=over, **settings)


def wrapped(model: nn.Module, mesh: DeviceMesh, options: argparse.Namespace) -> tuple[nn.Module, Callable[[], None]]:
    """Every rank keeps all."""
    copied = DistributedDataParallel(
        model, device_ids=[torch.cuda.current_device()], process_group=mesh["shards"].get_group()
    )
    return copied, lambda: passes(copied, mesh, options)


def passes(model: nn.Module, mesh: DeviceMesh | None, options: argparse.Namespace) -> None:
    """Forward and backward of every micro-batch of a step."""
    ranks = mesh["copies"].size() * mesh["shard"].size() if mesh else 1
    count = (options.global_batch or options.micro_batch * ranks) // (options.micro_batch * ranks)
    for _ in range(count):
        ids = torch.randint(0, 1000, (options.micro_batch, options.seq), device="cuda")
        with parts_of(ids, mesh, options) as (tokens, positions, labels):
            one_pass(model, tokens, positions, labels, options)


def one_pass(
    model: nn.Module, ids: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor, options: argparse.Namespace
) -> None:
    """Forward and backward, as the precision asks."""
    autocast = options.precision == "bf16-mixed" and options.zero < SHARDED and not options.lora
    saved = "activations" in options.offload and options.checkpoint == "none"
    with splits_loss(options.tp > 1):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast), saved_on_host(model, saved):
            loss = model(input_ids=ids, position_ids=positions, labels=labels, shift_labels=labels).loss
        loss.backward()


def causal_only(model: Any) -> None:
    """Ring attention is causal by itself: a mask of this rank's part would say something else."""
    for block in model.model.layers:
        block.self_attn.register_forward_pre_hook(_without_mask, with_kwargs=True)


def _without_mask(module: nn.Module, values: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return values, keywords | {"attention_mask": None}


@contextlib.contextmanager
def parts_of(
    ids: torch.Tensor, mesh: DeviceMesh | None, options: argparse.Namespace
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Tokens, positions and labels of this rank: its part of the sequence, where context parallelism divides it."""
    positions = torch.arange(ids.shape[1], device="cuda").unsqueeze(0)
    labels = ids.roll(-1, dims=1)
    buffers = [ids, positions, labels]
    if options.cp == 1:
        yield ids, positions, labels
        return
    assert mesh is not None
    with context_parallel(mesh["cp"], buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)):
        yield ids, positions, labels


if __name__ == "__main__":
    main()
