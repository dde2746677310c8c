"""Memory that nanotron keeps and other frameworks do not. Each rule is read from its source; none is measured.

| rule                                                                 | where nanotron does it             |
|----------------------------------------------------------------------|------------------------------------|
| gradients are made in 16 bits and added to the FP32 buffer only when | `optim/gradient_accumulator.py`    |
| the backward pass of a micro-batch has ended                         |                                    |
| without ZeRO and with replicas, DDP keeps a 16-bit bucket of each    | `trainer.py`, `_init_model`        |
| two buffers for gathered inputs and gradients are never freed        | `parallel/tensor_parallel/`        |
| ZeRO-1 gathers parameters through a flat copy of its own shard, one  | `optim/zero.py`, `distributed.py`; |
| of every shard, and a third that NCCL's backend makes                | PyTorch's `ProcessGroupNCCL`       |
| the output of a row-parallel matrix is whole until it is scattered   | `tensor_parallel/functional.py`;   |
| on NCCL's stream, and the allocator cannot reuse it before that      | `ProcessGroupNCCL`, `recordStream` |

How blocks are divided over a pipeline is up to `sharding`, and when a moment occurs is up to `moments`.
"""

import numpy as np

from tonnage.budget.configuration import Configuration, Quantity
from tonnage.budget.frameworks import made_bytes, working_bytes
from tonnage.budget.sharding import StageParameters, shards
from tonnage.budget.terms import Term
from tonnage.ledger import Category
from tonnage.models.shape import ModelShape

_GATHER_BUFFERS = 2
# Tensors per block: outputs of its row-parallel matrices; backward, gradients of the others' inputs.
_SCATTERED = 2
# CUDA queues this many launches ahead of the GPU. Those of a block are counted in nanotron's `models/llama.py` and
# `functional.py`: kernels, copies and collectives, forward and backward.
_LAUNCHES_AHEAD, _BLOCK_LAUNCHES, _BLOCK_LAUNCHES_BACKWARD = 1024, 29, 37


def trains_with_nanotron(configuration: Configuration) -> bool:
    """Say whether nanotron trains the full model, not adapters."""
    return configuration.framework == "nanotron" and not configuration.lora_rank


def gather_buffers(shape: ModelShape, configuration: Configuration, tokens: Quantity) -> list[Term]:
    """Return the shared buffers for gathered inputs of column-parallel and gradients of row-parallel matrices."""
    if not trains_with_nanotron(configuration):
        return []
    buffers = _GATHER_BUFFERS * (np.asarray(configuration.tp) > 1)
    size = buffers * configuration.compute_bytes * shape.hidden * tokens
    numbers = {"buffers": buffers, "bytes": configuration.compute_bytes, "hidden": shape.hidden, "tokens": tokens}
    formula = "buffers × bytes × hidden × tokens"
    return [Term(Category.WORKSPACE, "gather buffers", size, formula, numbers, "model")]


def made_gradients(
    shape: ModelShape, stage: StageParameters, configuration: Configuration, *, ended: bool
) -> list[Term]:
    """Return a micro-batch's gradients before accumulation; without the embedding's until backward has `ended`."""
    if not trains_with_nanotron(configuration):
        return []
    shared = stage.heads if shape.tied else 0.0
    missing = 0.0 if ended else stage.embeds * (1 - shared) * shape.embedding_parameters / configuration.tp
    count = stage.parameters - missing
    numbers = {"parameters": count, "bytes": made_bytes(configuration)}
    size = made_bytes(configuration) * count
    return [Term(Category.GRADIENTS, "gradients not yet added", size, "parameters × bytes", numbers, "model")]


def scattered(shape: ModelShape, stage: StageParameters, configuration: Configuration, tokens: Quantity) -> list[Term]:
    """Return the inputs of reduce-scatters that cannot be freed yet, as the host runs ahead of the GPU.

    They are those of forward passes in flight, and as much of a backward pass as CUDA's queue holds.
    """
    if not trains_with_nanotron(configuration):
        return []
    layers = sum(len(stack.layers) for stack in shape.stacks) * stage.share
    ahead = np.minimum(layers * stage.in_flight, _LAUNCHES_AHEAD // _BLOCK_LAUNCHES)
    behind = np.minimum((_LAUNCHES_AHEAD - ahead * _BLOCK_LAUNCHES) // _BLOCK_LAUNCHES_BACKWARD, layers)
    tensors = _SCATTERED * (ahead + behind) * (np.asarray(configuration.tp) > 1)
    size = tensors * configuration.compute_bytes * shape.hidden * tokens
    numbers = {"tensors": tensors, "bytes": configuration.compute_bytes, "hidden": shape.hidden, "tokens": tokens}
    words = "tensors × bytes × hidden × tokens"
    return [Term(Category.FRAGMENTATION, "held for NCCL's stream", size, words, numbers, "model")]


def flat_copies(stage: StageParameters, configuration: Configuration, *, in_use: bool) -> list[Term]:
    """Return the flat copies through which ZeRO-1 gathers.

    Most are larger than any block that activations free, so the allocator keeps them even while unused. This is an
    upper bound: logits of a small model may leave room for them. The peak is that of reserved memory; if the gather
    itself is the allocated peak (a large model, few tokens), the allocated figure is too low.
    """
    ranks = shards(configuration)
    if not trains_with_nanotron(configuration) or configuration.zero == 0:
        return []
    copies = (2 + 1 / ranks) * (np.asarray(ranks) > 1)
    size = copies * working_bytes(configuration) * stage.parameters
    numbers = {"copies": copies, "bytes": working_bytes(configuration), "parameters": stage.parameters}
    category = Category.WORKSPACE if in_use else Category.FRAGMENTATION
    return [Term(category, "flat copies of parameters", size, "copies × bytes × parameters", numbers, "model")]
