"""SGLang's memory accounting by version: its defaults, and how many tokens its KV cache gets.

    tokens = (free at start × mem_fraction_static − weights) // bytes per token       "max_total_num_tokens"

`mem_fraction_static` is a share of the memory free when the model begins to load, after the CUDA context and NCCL. The
rest is for activations, CUDA graphs, and the token table of running requests. Nothing is profiled, so the KV cache does
not depend on them; this module counts whether they fit. A page is one token. The rules are data (`data/sglang.toml`);
data-parallel attention, speculative decoding, LoRA adapters and vision towers are not modelled.
"""

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from tonnage.budget import table
from tonnage.budget.serving.forward import ForwardPass, forward_bytes, sampler_bytes
from tonnage.budget.serving.own_engine import context_term
from tonnage.budget.serving.vllm import graph_term, rules_of
from tonnage.budget.serving.weights import StageLayers
from tonnage.budget.terms import Term
from tonnage.hardware import Gpu
from tonnage.ledger import Category
from tonnage.models.shape import AttentionKind, ModelShape
from tonnage.units import GIB

if TYPE_CHECKING:
    from tonnage.budget.serving.memory import ServingConfiguration

# Default limit of running requests: 512 per full context that the KV cache holds, and at least this many.
LEAST_RUNNING = 2048
# Memory of a card, as SGLang reports it, from which it leaves at least 10 GiB.
_LARGE_GIB, _LARGE_LEFT_GIB = 60, 10
_LATENT_PREFILL_GIB = 1.5
_PREFILL_STEPS = ((4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256))
# Bytes per vocabulary entry and sequence: logits, their FP32 copy, probabilities and sampling temporaries.
_SAMPLER_BYTES = 14


def latest_version() -> str:
    """Return the newest release whose rules are known."""
    return str(table("sglang")["latest"])


@cache
def find_release(version: str) -> dict[str, Any]:
    """Return the rules of a version."""
    return rules_of("SGLang", table("sglang"), version)


def card_row(version: str, gpu: Gpu) -> dict[str, float]:
    """Return the defaults for the GPU's memory size."""
    rows: list[dict[str, float]] = find_release(version)["cards"]
    return next(row for row in rows if gpu.memory_bytes / GIB < row["below_gib"])


def graph_batch(version: str, gpu: Gpu, tp: int) -> int:
    """Return the largest batch with a CUDA graph."""
    return int(card_row(version, gpu)["graph_batch" if tp < 4 else "graph_batch_tp4"])


def default_fraction(shape: ModelShape, asked: "ServingConfiguration", gpu: Gpu) -> float:
    """Return the default of --mem-fraction-static."""
    release, row = find_release(asked.engine_version), card_row(asked.engine_version, gpu)
    total, gpus = gpu.memory_bytes / GIB, asked.tp * asked.pp
    if release["fraction"] == "by-tp":
        table = ((16, 0.79), (8, 0.81), (4, 0.85), (2, 0.87), (1, 0.88))
        return (total - 13) / total if total > 80 else next(share for tp, share in table if asked.tp >= tp)
    if release["fraction"] == "by-card":
        left = row["left_gib"] + row["left_gib_per_gpu"] * gpus
    else:
        largest = 0 if asked.eager else graph_batch(asked.engine_version, gpu, asked.tp)
        left = (512 + 1.5 * max(asked.batched_tokens, 2048) + 2 * largest) / 1024 + gpus / 8
        if release["prefill_graphs"] and not asked.eager:
            mixers = (layer.attention for layer in shape.decoder.layers)
            latent = any(mixer and mixer.kind is AttentionKind.LATENT for mixer in mixers)
            # Prompt lengths with a CUDA graph.
            steps = (*_PREFILL_STEPS, (4608, asked.batched_tokens + 1, 512))
            prompts = sum(size <= asked.batched_tokens for each in steps for size in range(*each))
            left += _LATENT_PREFILL_GIB if latent else 8 * prompts / 1024
        left = max(left, _LARGE_LEFT_GIB) if total > _LARGE_GIB else left
    return max(round((total - left) / total, 3), 0.01)


def decode_sizes(largest: int) -> int:
    """Return how many batch sizes have a CUDA graph."""
    sizes = {1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, largest + 1, 32), largest}
    return sum(size <= largest for size in sizes)


def reserve_terms(shape: ModelShape, stage: StageLayers, asked: "ServingConfiguration", gpu: Gpu) -> list[Term]:
    """Return what must fit beside the static share; SGLang measures none of it before allocating the KV cache."""
    version, width = asked.engine_version, asked.compute_bytes
    at = ForwardPass(asked.batched_tokens, asked.rows, asked.tp, width)
    forward = forward_bytes(shape, stage, at, held=4)
    rows = graph_batch(version, gpu, asked.tp)
    sampler = sampler_bytes(shape, ForwardPass(rows, rows, asked.tp, width), _SAMPLER_BYTES) if stage.last else 0
    peak = Term(
        Category.ACTIVATIONS, "peak of a step", max(forward, sampler) + gpu.cublas_workspace_bytes,
        "max(a chunk of a prompt, sampler) + cuBLAS",
        {"forward_bytes": forward, "sampler_bytes": sampler, "tokens": asked.batched_tokens}, "model",
    )  # fmt: skip
    table = asked.max_seqs * (asked.context + 4) * 4
    requests = Term(
        Category.WORKSPACE, "tokens of requests", table, "running requests × (context + 4) × 4 bytes",
        {"running_requests": asked.max_seqs, "context": asked.context},
    )  # fmt: skip
    return [peak, requests, graph_term(shape, stage, asked, decode_sizes(rows), rows)]


def context_terms(gpu: Gpu) -> tuple[Term, Term]:
    """Return the CUDA context and loaded kernels, separately as SGLang measures the GPU between them."""
    whole = context_term(gpu)
    kernels = gpu.overheads["kernels"].size_bytes if "kernels" in gpu.overheads else 0
    late = Term(Category.CONTEXT, "kernels", kernels, "as the catalogue has them", {}, whole.source)
    return replace(whole, size_bytes=int(whole.size_bytes) - kernels, formula="context + cublas"), late


def linked_term(tp: int, gpu: Gpu) -> Term:
    """Return NCCL's and the all-reduce's buffers, allocated before the model loads if there are several GPUs."""
    size = table("sglang")["nccl"]["linked" if gpu.nvlink_bytes_per_s else "plain"] if tp > 1 else 0
    return Term(Category.WORKSPACE, "NCCL", size, "as SGLang logged it", {"tp": tp}, "published logs")
