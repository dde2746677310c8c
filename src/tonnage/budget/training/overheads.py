"""Memory beside tensors: workspaces, the CUDA context, NCCL's buffers, and the allocator's fragmentation."""

import functools
from collections.abc import Sequence

import numpy as np

from tonnage.budget.terms import Term, total
from tonnage.budget.training.configuration import Configuration, FrameworkName, Quantity
from tonnage.budget.training.loss import loss_term
from tonnage.budget.training.states import StageShare
from tonnage.hardware import Gpu
from tonnage.ledger import Category
from tonnage.units import KIB, MIB

# From Transformer Engine's source: `get_cublas_workspace_size_bytes`.
_ENGINE_BYTES, _ENGINE_BYTES_BEFORE, _HOPPER = 32 * MIB, 4 * MIB, 9
# From NCCL's source: the buffers of one connection (simple, LL and LL128 protocols), by 16 channels, both directions.
NCCL_CONNECTION_BYTES = 4 * MIB + 512 * KIB + 4800 * KIB
NCCL_CONNECTIONS = 16 * 2
# Share of the gradients' bytes lost to fragmentation: see `fragmentation`.
_GRADIENTS_LOST = 0.38
_LOSS_LOST, _WIDE_LOSS_LOST = 1 / 6, 6 / 16


def workspace(gpu: Gpu, framework: FrameworkName = "torch") -> Term:
    """Return cuBLAS's workspaces in both threads, forward and backward, and Transformer Engine's under Megatron."""
    size = gpu.cublas_workspace_bytes
    if framework != "megatron":
        return Term(Category.WORKSPACE, "cuBLAS", 2.0 * size, "2 threads × bytes", {"bytes": size})
    own = _ENGINE_BYTES if gpu.compute_capability[0] >= _HOPPER else _ENGINE_BYTES_BEFORE
    numbers = {"bytes": size, "own": own}
    return Term(Category.WORKSPACE, "cuBLAS", 2.0 * size + own, "2 threads × bytes + Transformer Engine's own", numbers)


def context(gpu: Gpu) -> Term:
    """Return the CUDA context, torch's kernels and library handles, from the GPU catalogue."""
    known = {name: overhead.size_bytes for name, overhead in gpu.overheads.items()}
    numbers = {name: known.get(name, 0) for name in ("context", "kernels", "cublas", "cudnn")}
    total = sum(numbers.values()) + numbers["cublas"]
    formula = "context + kernels + 2 × cuBLAS + cuDNN"
    return Term(Category.CONTEXT, "CUDA context", float(total), formula, numbers, "measured")


def nccl(config: Configuration) -> Term:
    """Return NCCL's buffers: a communicator of all ranks, and one per kind of parallelism with smaller groups.

    Hybrid sharding has two kinds: ranks that share a copy, and ranks that hold the same shard. Replicas of experts
    under expert parallelism have a kind of their own.
    """
    replicas = config.data * config.cp
    groups: tuple[Quantity, ...] = (replicas,)
    if config.zero:
        experts = np.where(np.asarray(config.ep) > 1, config.expert_shards, 1)
        groups = config.shards, replicas // config.shards, experts
    kinds = (config.tp, config.pp, config.cp, config.ep, *groups)
    smaller = ((np.asarray(ranks) > 1) & (ranks < config.gpus) for ranks in kinds)
    communicators: Quantity = (np.asarray(config.gpus) > 1) + sum(kind.astype(float) for kind in smaller)
    size = communicators * NCCL_CONNECTION_BYTES * NCCL_CONNECTIONS
    numbers = {"communicators": communicators, "connections": NCCL_CONNECTIONS, "bytes": NCCL_CONNECTION_BYTES}
    return Term(Category.CONTEXT, "NCCL buffers", size, "communicators × connections × bytes", numbers, "model")


def fragmentation(stage: StageShare) -> Term:
    """Return what the caching allocator reserves at its peak beyond what is allocated.

    The 16-bit logits leave a hole that nothing else fits into: 2 of the 12 bytes of a loss. If FP32 logits are shifted,
    their gradient is a token shorter than that of all: 6 of 16 bytes. Gradients land in holes that activations left and
    are later allocated elsewhere. Over 59 runs on the virtual GPU, none measured on a real one, the two explain
    reserved memory to 4 % in the median and 10 % in nine of ten. Buffers of other streams are added.
    """
    config, trained = stage.configuration, stage.trained
    loss = loss_term(stage.shape, config, "loss").size_bytes * stage.heads
    made = np.where(config.reduces_once, trained.parameters, trained.gradients_kept)[()]
    gradients = config.made_bytes * made * (config.lora_rank == 0 and not config.step_in_backward)
    holes = _WIDE_LOSS_LOST if config.wide_logits else _LOSS_LOST
    size = holes * loss + _GRADIENTS_LOST * gradients
    numbers = {"loss": loss, "holes": holes, "gradients": gradients, "share": _GRADIENTS_LOST}
    return Term(Category.FRAGMENTATION, "fragmentation", size, "holes × loss + share × gradients", numbers, "model")


def other_streams(stage: StageShare, moments: Sequence[Sequence[Term]]) -> list[Term]:
    """Return what FSDP2's gather and reduce streams hold: memory freed on a stream stays with that stream.

    The gather stream holds the next block while parameters outside blocks are gathered, and a 16-bit copy of its shard;
    with resharding, one block is already among every moment's terms. The reduce stream holds the gradients' shards, or
    the sums of what is outside blocks (two blocks) if larger. Reserved memory peaks where live memory plus what these
    streams hold beyond it is largest.
    """
    config = stage.configuration
    if config.framework != "fsdp2" or config.zero == 0:
        return []
    block, over = stage.largest_block, config.shards
    gathered = config.compute_bytes * (stage.outside + block / over + (0 if config.zero == 3 else block))
    summed = np.maximum(stage.trained.outside, 2 * stage.largest_trained_block)
    summed = summed * config.gradient_bytes * (config.lora_rank == 0)
    alive = [total(terms) for terms in moments]
    live = (total(term for term in terms if term.name == "gradients") for terms in moments)
    absent = [stage.gradients.size_bytes - there for there in live]
    most = [here + np.maximum(each, summed) for here, each in zip(alive, absent, strict=True)]
    reduced = functools.reduce(np.maximum, most) - functools.reduce(np.maximum, alive)
    numbers = {"gathered": gathered, "reduced": reduced}
    size, words = gathered + reduced, "gathered + reduced, beyond what is alive at the peak"
    return [Term(Category.FRAGMENTATION, "kept by other streams", size, words, numbers, "model")]
