"""TensorRT-LLM's memory accounting: its PyTorch backend runs dummy requests, then takes a share of the free memory.

    tokens = (total − peak of the dry run) × free_gpu_memory_fraction // bytes per block × block

The peak includes everything: CUDA context, weights, activations of `max_num_tokens` tokens, logits of `max_batch_size` sequences
and CUDA graphs. So 0.9 leaves a tenth of the rest free, not of the card. The defaults are data (`data/tensorrt_llm.toml`);
TensorRT engines, attention data parallelism, speculative decoding and vision towers are not modelled.
"""

from typing import TYPE_CHECKING, Any

from tonnage.budget import table
from tonnage.budget.serving.forward import ForwardPass, forward_bytes
from tonnage.budget.serving.vllm import graph_term
from tonnage.budget.serving.weights import StageLayers
from tonnage.budget.terms import Term
from tonnage.hardware import Gpu
from tonnage.ledger import Category
from tonnage.models.shape import ModelShape

if TYPE_CHECKING:
    from tonnage.budget.serving.memory import ServingConfiguration

# The oldest architecture that its kernels are built for.
LEAST_CAPABILITY = (8, 0)


def defaults() -> dict[str, Any]:
    """Return the defaults."""
    return table("tensorrt_llm")


def graph_sizes(largest: int) -> int:
    """Return how many batch sizes have a CUDA graph."""
    return sum(size <= largest for size in (1, 2, 4, *range(8, 129, 8), 256, 512, 1024, 2048))


def dry_run_terms(shape: ModelShape, stage: StageLayers, asked: "ServingConfiguration", gpu: Gpu) -> list[Term]:
    """Return what the dry run holds beside weights and context."""
    tokens, sequences = asked.batched_tokens, asked.rows
    forward = forward_bytes(shape, stage, ForwardPass(tokens, sequences, asked.tp, asked.compute_bytes), held=4)
    logits = sequences * shape.vocab * defaults()["logits_bytes"] if stage.last else 0
    peak = Term(
        Category.ACTIVATIONS, "peak of the dry run", max(forward, logits) + gpu.cublas_workspace_bytes,
        "max(forward, sequences × vocabulary × bytes per word) + cuBLAS",
        {"forward_bytes": forward, "logits_bytes": logits, "tokens": tokens, "sequences": sequences}, "model",
    )  # fmt: skip
    largest = min(defaults()["graph_batch"], asked.max_seqs)
    return [peak, graph_term(shape, stage, asked, graph_sizes(largest), largest)]
