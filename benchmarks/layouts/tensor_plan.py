"""Tensor parallelism of a Llama by `parallelize_module`: matrices by heads and widths, logits by the vocabulary."""

import contextlib
from typing import Any

from passes import blocks_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)


def split_tensors(model: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> None:
    """In place, a whole model or a stage of one; with `sequence`, what lies between the matrices is split along the sequence."""
    stream = Shard(1) if sequence else Replicate()
    embed = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
    head = ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False)
    plan: dict[str, Any] = {"model.embed_tokens": embed, "embed": embed, "lm_head": head, "head": head}
    if sequence:
        plan |= {"model.norm": SequenceParallel(), "norm": SequenceParallel()}
    there = {name for name, _ in model.named_modules()}
    parallelize_module(model, mesh, {name: style for name, style in plan.items() if name in there})
    for block in blocks_of(model):
        parallelize_module(block, mesh, _block_plan(stream, sequence))


def _block_plan(stream: Any, sequence: bool) -> dict[str, Any]:
    plan: dict[str, Any] = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
    plan |= {name: RowwiseParallel(output_layouts=stream) for name in ("self_attn.o_proj", "mlp.down_proj")}
    if sequence:
        plan |= {"input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel()}
        plan["self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": stream}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        )
        plan["mlp"] = PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),))
    return plan


def splits_loss(split: bool) -> contextlib.AbstractContextManager[Any]:
    """The loss of logits that stay split, where they are."""
    return loss_parallel() if split else contextlib.nullcontext()
