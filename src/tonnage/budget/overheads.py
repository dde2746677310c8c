"""What a process holds beside its tensors: workspaces, the CUDA context, NCCL's buffers, and what the allocator wastes."""

import numpy as np

from tonnage.budget.configuration import Configuration, Quantity
from tonnage.budget.frameworks import framework_of, gradient_bytes, made_bytes
from tonnage.budget.loss import loss_term
from tonnage.budget.sharding import Stage, block_parameters, sharded
from tonnage.budget.terms import Term
from tonnage.hardware import Gpu
from tonnage.ledger import Category
from tonnage.models.shape import ModelShape
from tonnage.units import KIB, MIB

# PyTorch gives cuBLAS a workspace for each thread that uses it: the forward pass has one, the backward pass another.
_CUBLAS_BYTES = {9: 32 * MIB}
_CUBLAS_BYTES_ELSEWHERE = 8 * MIB + 128 * KIB
# NCCL's source: the buffers of one connection (simple, LL and LL128 protocols), by 16 channels, to and from.
NCCL_CONNECTION_BYTES = 4 * MIB + 512 * KIB + 4800 * KIB
NCCL_CONNECTIONS = 16 * 2
# The share of the gradients' bytes that is lost to holes: see `fragmentation`.
_GRADIENTS_LOST = 0.38


def workspace(gpu: Gpu) -> Term:
    """cuBLAS in both threads."""
    size = _CUBLAS_BYTES.get(gpu.compute_capability[0], _CUBLAS_BYTES_ELSEWHERE)
    return Term(Category.WORKSPACE, "cuBLAS", 2.0 * size, "2 threads × bytes", {"bytes": size})


def context(gpu: Gpu) -> Term:
    """The driver's context, torch's kernels and the handles of libraries, as the catalogue has them."""
    known = {name: overhead.size_bytes for name, overhead in gpu.overheads.items()}
    numbers = {name: known.get(name, 0) for name in ("context", "kernels", "cublas", "cudnn")}
    total = sum(numbers.values()) + numbers["cublas"]
    return Term(
        Category.CONTEXT, "CUDA context", float(total), "context + kernels + 2 × cuBLAS + cuDNN", numbers, "measured"
    )


def nccl(configuration: Configuration) -> Term:
    """A communicator for each kind of parallelism that is used."""
    kinds = (configuration.tp, configuration.pp, configuration.cp, configuration.data)
    communicators: Quantity = sum((np.asarray(ranks) > 1).astype(float) for ranks in kinds)
    size = communicators * NCCL_CONNECTION_BYTES * NCCL_CONNECTIONS
    numbers = {"communicators": communicators, "connections": NCCL_CONNECTIONS, "bytes": NCCL_CONNECTION_BYTES}
    return Term(Category.CONTEXT, "NCCL buffers", size, "communicators × connections × bytes", numbers, "model")


def fragmentation(shape: ModelShape, end: Stage, configuration: Configuration) -> Term:
    """What the caching allocator holds at its peak beyond what is allocated, for want of a block that fits.

    The 16-bit logits leave a hole that nothing else fits into: 2 of the 12 bytes of a loss. Gradients land in what
    activations left and come back elsewhere. Over 59 runs of the virtual GPU, none of them measured on a real one, the
    two explain reserved memory to 4 % in the median and 10 % in nine of ten. Buffers of other streams come on top.
    """
    tokens = configuration.micro_batch * configuration.seq / configuration.cp
    loss = loss_term(shape, configuration, tokens, "loss").size_bytes * end.heads
    made = sharded(end, configuration, framework_of(configuration).gradients_sharded_from)
    gradients = made_bytes(configuration) * made * (configuration.lora_rank == 0)
    streams = _stream_bytes(shape, end, configuration)
    size = loss / 6 + _GRADIENTS_LOST * gradients + streams
    numbers = {"loss": loss, "gradients": gradients, "share": _GRADIENTS_LOST, "other streams": streams}
    return Term(
        Category.FRAGMENTATION, "fragmentation", size, "loss ÷ 6 + share × gradients + other streams", numbers, "model"
    )


def _stream_bytes(shape: ModelShape, end: Stage, configuration: Configuration) -> Quantity:
    """FSDP2 gathers and reduces on streams of their own, whose freed buffers no other stream may use.

    Each stream ends up with room for what is outside of blocks, or for two blocks.
    """
    if configuration.framework != "fsdp2" or configuration.zero == 0:
        return 0.0
    count = np.maximum(end.outside, 2 * block_parameters(shape, configuration))
    return count * (configuration.compute_bytes + (gradient_bytes(configuration) if not configuration.lora_rank else 0))
