"""vLLM's memory accounting by version: its defaults, and how it sizes the KV cache.

    available = total × utilisation − weights − peak of a profiling run − memory outside of torch [− graphs, from 0.20]
    blocks    = available // bytes per block                      "# GPU blocks"
    tokens    = blocks // groups × block                          "GPU KV cache size"

The profiling run computes `max_num_batched_tokens` tokens and samples for `max_num_seqs` sequences: with a large vocabulary, the
sampler is the peak. The CUDA context is created before vLLM first measures the GPU, so it lies outside its share. The rules are
data (`data/vllm.toml`); speculative decoding, LoRA adapters, vision towers and expert parallelism are not modelled.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from tonnage.budget import table
from tonnage.budget.serving.forward import (
    ForwardPass,
    expert_bytes,
    forward_bytes,
    graph_sizes,
    sampler_bytes,
)
from tonnage.budget.serving.weights import ExpertKernel, StageLayers
from tonnage.budget.terms import Term
from tonnage.errors import RequestError
from tonnage.hardware import Gpu
from tonnage.ledger import Category
from tonnage.models.shape import AttentionKind, ModelShape
from tonnage.units import GIB

if TYPE_CHECKING:
    from tonnage.budget.serving.memory import ServingConfiguration

_VERSION = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?")
# DeepSeek-V3.2's indexer keeps a 128-wide FP8 key and its FP32 scale per token.
INDEX_BYTES = {"deepseek_v32": 132}
GRAPHS = "CUDA graphs"
# The oldest NVIDIA architecture that its kernels are built for.
LEAST_CAPABILITY = (7, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmRelease:
    """The rules of one version, explained in the data file."""

    generation: str
    utilization: float
    sampler: str
    graphs_subtracted: bool
    grouped: bool
    moe_workspace_kept: bool
    int4_kv: bool
    quantizes_whole: bool
    chunked_beyond: int
    batched_tokens: dict[str, int]
    max_seqs: dict[str, int]
    large_a100: bool
    full_graphs: bool
    largest_graph: int


def latest_version() -> str:
    """Return the newest release whose rules are known."""
    return str(table("vllm")["latest"])


@cache
def find_release(version: str) -> VllmRelease:
    """Return the rules of a version; vendor builds ("0.11.2+vendor5") count as the release they are based on."""
    return VllmRelease(**rules_of("vLLM", table("vllm"), version))


def rules_of(engine: str, data: dict[str, Any], version: str) -> dict[str, Any]:
    """Return the rules of an engine's version, each as the last release before it changed it; suffixes are ignored."""
    asked = _numbers(version)
    entries = [entry for entry in data["release"] if asked and _numbers(entry["since"]) <= asked]
    if not entries:
        raise RequestError(
            f"{version!r} is not a version of {engine} whose rules are known.",
            hint=f"Write it like --engine-version {data['latest']}; the oldest is {data['release'][0]['since']}.",
        )
    return {name: value for entry in entries for name, value in entry.items() if name != "since"}


def _numbers(version: str) -> tuple[int, ...]:
    match = _VERSION.match(version.strip())
    return tuple(int(part or 0) for part in match.groups()) if match else ()


def card_class(release: VllmRelease, gpu: Gpu) -> str:
    """Return "small", "large" or "huge": the class that determines the defaults."""
    if gpu.memory_bytes >= 160 * GIB:
        return "huge"
    large = release.large_a100 or "a100" not in gpu.name.lower()
    return "large" if gpu.memory_bytes >= 70 * GIB and large else "small"


@cache
def expert_kernel(gpu: Gpu) -> ExpertKernel:
    """Return the kernel that multiplies MXFP4 experts on this GPU."""
    rows = [row for row in table("vllm")["mxfp4"] if gpu.maker == "NVIDIA" or row["name"] == "Triton"]
    fitting = [row for row in rows if gpu.maker != "NVIDIA" or tuple(row["since"]) <= gpu.compute_capability]
    chosen = dict((fitting or rows)[-1])
    del chosen["since"]
    return ExpertKernel(**chosen)


def default_batched_tokens(release: VllmRelease, gpu: Gpu, context: int, max_seqs: int) -> int:
    """Return the default token limit of one step."""
    usual = release.batched_tokens[card_class(release, gpu)]
    if release.generation == "V0":
        cut = release.chunked_beyond and context > release.chunked_beyond
        return usual if cut else max(context, usual)
    return min(usual, max_seqs * context)


def profiling_terms(shape: ModelShape, stage: StageLayers, asked: "ServingConfiguration", gpu: Gpu) -> Iterator[Term]:
    """Yield what vLLM finds in its profiling run beside the weights."""
    release = find_release(asked.engine_version)
    at = ForwardPass(asked.batched_tokens, asked.rows, asked.tp, asked.compute_bytes)
    # The sines and cosines of every position, one table for all layers.
    mixers = [layer.attention for layer, _ in stage.kinds if layer.attention is not None]
    rotary = max((m.rope_dim if m.kind is AttentionKind.LATENT else m.head_dim for m in mixers), default=0)
    numbers: dict[str, object] = {"positions": shape.max_positions, "rotary_dim": rotary}
    size = shape.max_positions * rotary * asked.compute_bytes
    yield Term(Category.PARAMETERS, "rotary table", size, "positions × rotary dim × bytes", numbers, "model")
    # The larger of the forward pass and the sampler. V0 runs layer by layer; V1's compiled pieces also hold attention's
    # output.
    kept = expert_bytes(shape, stage, at) if release.moe_workspace_kept else 0
    forward = forward_bytes(shape, stage, at, held=3 if release.generation == "V0" else 4, experts=not kept)
    per_word = table("vllm")["sampler_bytes"][release.sampler]
    rows = min(at.sequences, gpu.sm_count) if release.sampler == "triton" else 0
    sampler = sampler_bytes(shape, at, per_word, rows) if stage.last else 0
    numbers = {
        "forward_bytes": forward, "sampler_bytes": sampler, "tokens": at.tokens, "sequences": at.sequences,
        "vocabulary": shape.vocab, "bytes_per_word": per_word, "expert_buffers_bytes": kept,
        "cublas_bytes": gpu.cublas_workspace_bytes,
    }  # fmt: skip
    yield Term(
        Category.ACTIVATIONS, "profiling peak", max(forward, sampler) + kept + gpu.cublas_workspace_bytes,
        "max(forward, sampler = sequences × vocabulary × bytes per word + …) + expert buffers + cuBLAS", numbers, "model",
    )  # fmt: skip
    yield non_torch_term(asked.tp, gpu)


def non_torch_term(tp: int, gpu: Gpu) -> Term:
    """Return the memory outside torch that vLLM finds after profiling."""
    linked = tp > 1 and gpu.nvlink_bytes_per_s > 0
    size = table("vllm")["non_torch"]["linked" if linked else "one"]
    formula = "as vLLM 0.19 logged on H100"
    return Term(Category.WORKSPACE, "outside of torch", size, formula, {"tp": tp}, "published logs")


def graphs_term(shape: ModelShape, stage: StageLayers, asked: "ServingConfiguration") -> Term:
    """Return vLLM's CUDA graphs: those of decode, and from 0.11 on both kinds."""
    release = find_release(asked.engine_version)
    largest = min(2 * asked.max_seqs, release.largest_graph, asked.batched_tokens)
    graphs = graph_sizes(largest) + (graph_sizes(min(largest, asked.max_seqs)) if release.full_graphs else 0)
    return graph_term(shape, stage, asked, graphs, largest)


def graph_term(shape: ModelShape, stage: StageLayers, asked: "ServingConfiguration", graphs: int, largest: int) -> Term:
    """Return an engine's CUDA graphs, of batches up to `largest`, which share a pool, and the driver's memory for each."""
    costs, layers = table("vllm")["graphs"], len(stage.layers)
    pool = forward_bytes(shape, stage, ForwardPass(largest, 0, asked.tp, asked.compute_bytes), held=4)
    size = pool + graphs * (costs["bytes_per_graph"] + layers * costs["bytes_per_layer"])
    numbers: dict[str, object] = {"graphs": graphs, "largest_batch": largest, "layers": layers, **costs}
    formula = "pool of the largest + graphs × (bytes per graph + layers × bytes per layer)"
    return Term(Category.WORKSPACE, GRAPHS, 0 if asked.eager else size, formula, numbers, "rough model")
