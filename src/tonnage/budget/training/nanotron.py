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

How blocks are divided over a pipeline is up to `states`, and when a moment occurs is up to `moments`.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from tonnage.budget.terms import Term, product_term
from tonnage.budget.training.states import StageShare
from tonnage.ledger import Category

_GATHER_BUFFERS = 2
# Tensors per block: outputs of its row-parallel matrices; backward, gradients of the others' inputs.
_SCATTERED = 2
# CUDA queues this many launches ahead of the GPU. Those of a block are counted in nanotron's `models/llama.py` and
# `functional.py`: kernels, copies and collectives, forward and backward.
_LAUNCHES_AHEAD, _BLOCK_LAUNCHES, _BLOCK_LAUNCHES_BACKWARD = 1024, 29, 37


class NanotronTerms(NamedTuple):
    """What nanotron keeps beside what every framework does; nothing for others, and for adapters."""

    buffers: tuple[Term, ...] = ()  # for gathered inputs of column-parallel and gradients of row-parallel matrices
    held: tuple[Term, ...] = ()  # by streams and allocator, during a step's passes
    gathering: tuple[Term, ...] = ()  # in the optimizer's step
    made: tuple[Term, ...] = ()  # a micro-batch's gradients before accumulation, without the embedding's
    made_at_end: tuple[Term, ...] = ()  # with it, when the backward pass has ended


def nanotron_terms(stage: StageShare) -> NanotronTerms:
    """Return them for a stage."""
    shape, config = stage.shape, stage.configuration
    if config.framework != "nanotron" or config.lora_rank:
        return NanotronTerms()
    tokens, splits = config.tokens, np.asarray(config.tp) > 1
    sizes = {"bytes": config.compute_bytes, "hidden": shape.hidden, "tokens": tokens}
    shared = product_term(Category.WORKSPACE, "gather buffers", buffers=_GATHER_BUFFERS * splits, **sizes)
    # Inputs of reduce-scatters that cannot be freed yet, as the host runs ahead of the GPU: those of forward passes in
    # flight, and as much of a backward pass as CUDA's queue holds.
    ahead = np.minimum(stage.layers * stage.in_flight, _LAUNCHES_AHEAD // _BLOCK_LAUNCHES)
    behind = np.minimum((_LAUNCHES_AHEAD - ahead * _BLOCK_LAUNCHES) // _BLOCK_LAUNCHES_BACKWARD, stage.layers)
    tensors = _SCATTERED * (ahead + behind) * splits
    scattered = product_term(Category.FRAGMENTATION, "held for NCCL's stream", tensors=tensors, **sizes)
    # Flat copies through which ZeRO-1 gathers. Most are larger than any block that activations free, so the allocator
    # keeps them even while unused. This is an upper bound: logits of a small model may leave room for them. The peak is
    # that of reserved memory; if the gather itself is the allocated peak (a large model, few tokens), the allocated
    # figure is too low.
    flat: list[Term] = []
    if config.zero:
        copies = (2 + 1 / config.shards) * (np.asarray(config.shards) > 1)
        numbers = {"copies": copies, "bytes": config.working_bytes, "parameters": stage.parameters}
        flat = [product_term(Category.WORKSPACE, "flat copies of parameters", **numbers)]
    kept = (*(replace(term, category=Category.FRAGMENTATION) for term in flat), scattered)
    # Gradients of this micro-batch.
    tied = stage.heads if shape.tied else 0.0
    missing = stage.embeds * (1 - tied) * shape.embedding_parameters / config.tp
    made = (
        product_term(Category.GRADIENTS, "gradients not yet added", parameters=count, bytes=config.made_bytes)
        for count in (stage.parameters - missing, stage.parameters)
    )
    return NanotronTerms((shared,), kept, tuple(flat), (next(made),), (next(made),))
