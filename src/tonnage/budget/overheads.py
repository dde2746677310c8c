"""Memory beside tensors: workspaces, the CUDA context, NCCL's buffers, and the allocator's fragmentation."""

import functools
from collections.abc import Iterable, Sequence

import numpy as np

from tonnage.budget.configuration import Configuration, FrameworkName, Quantity
from tonnage.budget.frameworks import framework_of, gradient_bytes, made_bytes, reduces_once
from tonnage.budget.loss import loss_term
from tonnage.budget.sharding import StageParameters, block_parameters, expert_shards, sharded, shards, trained_stage
from tonnage.budget.states import states
from tonnage.budget.terms import Term, total
from tonnage.hardware import Gpu
from tonnage.ledger import Category
from tonnage.models.shape import ModelShape
from tonnage.units import KIB, MIB

# PyTorch allocates a cuBLAS workspace per thread that uses it: one for the forward pass, one for the backward pass.
_CUBLAS_BYTES = {9: 32 * MIB}
_CUBLAS_BYTES_ELSEWHERE = 8 * MIB + 128 * KIB
# From Transformer Engine's source: `get_cublas_workspace_size_bytes`.
_ENGINE_BYTES, _ENGINE_BYTES_BEFORE, _HOPPER = 32 * MIB, 4 * MIB, 9
# From NCCL's source: the buffers of one connection (simple, LL and LL128 protocols), by 16 channels, both directions.
NCCL_CONNECTION_BYTES = 4 * MIB + 512 * KIB + 4800 * KIB
NCCL_CONNECTIONS = 16 * 2
# Share of the gradients' bytes lost to fragmentation: see `fragmentation`.
_GRADIENTS_LOST = 0.38
_LOSS_LOST, _WIDE_LOSS_LOST = 1 / 6, 6 / 16


def workspace(gpu: Gpu, framework: FrameworkName = "torch") -> Term:
    """Return cuBLAS's workspaces in both threads, and one more for Transformer Engine under Megatron."""
    size = _CUBLAS_BYTES.get(gpu.compute_capability[0], _CUBLAS_BYTES_ELSEWHERE)
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
    return Term(
        Category.CONTEXT, "CUDA context", float(total), "context + kernels + 2 × cuBLAS + cuDNN", numbers, "measured"
    )


def nccl(configuration: Configuration) -> Term:
    """Return NCCL's buffers: a communicator of all ranks, and one per kind of parallelism with smaller groups.

    Hybrid sharding has two kinds: ranks that share a copy, and ranks that hold the same shard. Replicas of experts
    under expert parallelism have a kind of their own.
    """
    kinds = (configuration.tp, configuration.pp, configuration.cp, configuration.ep, *_sharding_groups(configuration))
    smaller = ((np.asarray(ranks) > 1) & (ranks < configuration.gpus) for ranks in kinds)
    communicators: Quantity = (np.asarray(configuration.gpus) > 1) + sum(kind.astype(float) for kind in smaller)
    size = communicators * NCCL_CONNECTION_BYTES * NCCL_CONNECTIONS
    numbers = {"communicators": communicators, "connections": NCCL_CONNECTIONS, "bytes": NCCL_CONNECTION_BYTES}
    return Term(Category.CONTEXT, "NCCL buffers", size, "communicators × connections × bytes", numbers, "model")


def _sharding_groups(configuration: Configuration) -> tuple[Quantity, ...]:
    """Return the ranks in each kind of group that shards or replicates the same parameters."""
    replicas = configuration.data * configuration.cp
    if configuration.zero == 0:
        return (replicas,)
    experts = np.where(np.asarray(configuration.ep) > 1, expert_shards(configuration), 1)
    return shards(configuration), replicas // shards(configuration), experts


def fragmentation(shape: ModelShape, end: StageParameters, configuration: Configuration) -> Term:
    """Return what the caching allocator reserves at its peak beyond what is allocated.

    The 16-bit logits leave a hole that nothing else fits into: 2 of the 12 bytes of a loss. If FP32 logits are shifted,
    their gradient is a token shorter than that of all: 6 of 16 bytes. Gradients land in holes that activations left and
    are later allocated elsewhere. Over 59 runs on the virtual GPU, none measured on a real one, the two explain
    reserved memory to 4 % in the median and 10 % in nine of ten. Buffers of other streams are added.
    """
    tokens = configuration.tokens
    loss = loss_term(shape, configuration, tokens, "loss").size_bytes * end.heads
    end = trained_stage(shape, end, configuration)
    made = sharded(end, configuration, framework_of(configuration).gradients_sharded_from)
    made = np.where(reduces_once(configuration), end.parameters, made)[()]
    stay = configuration.lora_rank == 0 and not configuration.step_in_backward
    gradients = made_bytes(configuration) * made * stay
    holes = _WIDE_LOSS_LOST if configuration.wide_logits else _LOSS_LOST
    size = holes * loss + _GRADIENTS_LOST * gradients
    numbers = {"loss": loss, "holes": holes, "gradients": gradients, "share": _GRADIENTS_LOST}
    return Term(Category.FRAGMENTATION, "fragmentation", size, "holes × loss + share × gradients", numbers, "model")


def other_streams(
    shape: ModelShape, end: StageParameters, configuration: Configuration, moments: Sequence[Sequence[Term]]
) -> list[Term]:
    """Return what FSDP2's gather and reduce streams hold: memory freed on a stream stays with that stream.

    The gather stream holds the next block while parameters outside blocks are gathered, and a 16-bit copy of its shard;
    with resharding, one block is already among every moment's terms. The reduce stream holds the gradients' shards, or
    the sums of what is outside blocks (two blocks) if larger. Reserved memory peaks where live memory plus what these
    streams hold beyond it is largest.
    """
    if configuration.framework != "fsdp2" or configuration.zero == 0:
        return []
    block, over = block_parameters(shape, configuration), shards(configuration)
    gathered = configuration.compute_bytes * (end.outside + block / over + (0 if configuration.zero == 3 else block))
    outside = trained_stage(shape, end, configuration).outside
    largest = block_parameters(shape, configuration, trained=True)
    summed = np.maximum(outside, 2 * largest) * gradient_bytes(configuration) * (configuration.lora_rank == 0)
    gradients = states(shape, end, configuration).gradients.size_bytes
    alive = [total(terms) for terms in moments]
    live = [total(term for term in terms if term.name == "gradients") for terms in moments]
    absent = [gradients - there for there in live]
    most = _most(here + np.maximum(missing, summed) for here, missing in zip(alive, absent, strict=True))
    reduced = most - _most(alive)
    numbers = {"gathered": gathered, "reduced": reduced}
    size, words = gathered + reduced, "gathered + reduced, beyond what is alive at the peak"
    return [Term(Category.FRAGMENTATION, "kept by other streams", size, words, numbers, "model")]


def _most(sizes: Iterable[Quantity]) -> Quantity:
    return functools.reduce(np.maximum, sizes)
