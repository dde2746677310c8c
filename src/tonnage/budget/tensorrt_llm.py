"""TensorRT-LLM's memory accounting: its PyTorch backend runs dummy requests, then takes a share of the free memory.

    tokens = (total − peak of the dry run) × free_gpu_memory_fraction // bytes per block × block

The peak includes everything: CUDA context, weights, activations of `max_num_tokens` tokens, logits of `max_batch_size` sequences
and CUDA graphs. So 0.9 leaves a tenth of the rest free, not of the card. The defaults are data (`data/tensorrt_llm.toml`);
TensorRT engines, attention data parallelism, speculative decoding and vision towers are not modelled.
"""

import tomllib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.budget.forward import ForwardPass, cublas_workspace_bytes, forward_bytes, graph_bytes
from tonnage.budget.terms import Term
from tonnage.budget.vllm import GRAPHS, graph_costs
from tonnage.budget.weights import StageLayers
from tonnage.hardware import Gpu
from tonnage.ledger import Category
from tonnage.models.shape import ModelShape

if TYPE_CHECKING:
    from tonnage.budget.serving import ServingConfiguration

_DATA = Path(__file__).parent / "data" / "tensorrt_llm.toml"
# The oldest architecture that its kernels are built for.
LEAST_CAPABILITY = (8, 0)


@cache
def defaults() -> dict[str, Any]:
    """Return the defaults."""
    return tomllib.loads(_DATA.read_text("utf-8"))


def graph_sizes(largest: int) -> int:
    """Return how many batch sizes have a CUDA graph."""
    return sum(size <= largest for size in (1, 2, 4, *range(8, 129, 8), 256, 512, 1024, 2048))


def dry_run_terms(shape: ModelShape, stage: StageLayers, asked: "ServingConfiguration", gpu: Gpu) -> list[Term]:
    """Return what the dry run holds beside weights and context."""
    tokens, sequences = asked.batched_tokens, min(asked.max_seqs, asked.batched_tokens)
    forward = forward_bytes(shape, stage, ForwardPass(tokens, sequences, asked.tp, asked.compute_bytes), held=4)
    logits = sequences * shape.vocab * defaults()["logits_bytes"] if stage.last else 0
    peak = Term(
        Category.ACTIVATIONS, "peak of the dry run", max(forward, logits) + cublas_workspace_bytes(gpu),
        "max(forward, sequences × vocabulary × bytes per word) + cuBLAS",
        {"forward_bytes": forward, "logits_bytes": logits, "tokens": tokens, "sequences": sequences}, "model",
    )  # fmt: skip
    return [peak, _graphs(shape, stage, asked)]


def _graphs(shape: ModelShape, stage: StageLayers, asked: "ServingConfiguration") -> Term:
    largest = min(defaults()["graph_batch"], asked.max_seqs)
    costs, graphs = graph_costs(), graph_sizes(largest)
    pool = forward_bytes(shape, stage, ForwardPass(largest, 0, asked.tp, asked.compute_bytes), held=4)
    size = pool + graph_bytes(graphs, len(stage.layers), costs["bytes_per_graph"], costs["bytes_per_layer"])
    numbers: dict[str, object] = {"graphs": graphs, "largest_batch": largest, "layers": len(stage.layers), **costs}
    formula = "pool of the largest + graphs × (bytes per graph + layers × bytes per layer)"
    return Term(Category.WORKSPACE, GRAPHS, 0 if asked.eager else size, formula, numbers, "rough model")
