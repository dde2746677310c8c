"""Megatron-LM's functional tests: the peak of its last rank in bytes, on DGX A100, H100 and GB200, for hundreds of layouts.

The tests check these figures on every change of Megatron, so they are exact. Small models: 12 layers, 512 wide. The settings are
those of the commit that gave a figure its value. Megatron writes them from the last rank, which is in the last pipeline stage.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rows import Prediction, Reading, Row, Source

from tonnage.budget.training.configuration import AttentionKernel, Configuration, Precision
from tonnage.budget.training.memory import TrainingBudget, training_budget
from tonnage.hardware import find_gpu
from tonnage.models import ModelShape, from_config

FIGURES = Path(__file__).parents[1] / "figures" / "megatron.json"
CARDS = {"a100": "a100-80", "h100": "h100", "gb200": "gb200"}
GPT2_TOKENS = 50257
# The long-term container of the tests was NVIDIA's of PyTorch 24.01 until this month (commit 23a1dcaf74). Where algorithms must
# be deterministic, its Transformer Engine has no fused kernel for attention with dropout.
NEW_CONTAINER = "2025-11"
# What the planner has no word for.
NOT_MODELLED = {
    "FP8 and FP4 recipes of Transformer Engine": ("fp8-format", "fp4-format"),
    "multi-token prediction": ("mtp-num-layers",),
    "latent attention with Megatron's projections": ("multi-latent-attention",),
    "FSDP under Megatron": ("use-megatron-fsdp", "use-torch-fsdp2"),
    "CUDA graphs": ("cuda-graph-impl", "enable-cuda-graph", "external-cuda-graph"),
    "stages of a layout of their own": (
        "pipeline-model-parallel-layout", "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers",
        "account-for-embedding-in-pipeline-split",
    ),
    "rounds of another length in an interleaved pipeline": ("microbatch-group-size-per-virtual-pipeline-stage",),
    "reinforcement learning": ("perform-rl-step",),
    "distillation": ("export-te-mcore-model",),
    "the head's gradients deferred": ("defer-embedding-wgrad-compute",),
    "recomputation of chosen modules": ("recompute-modules",),
    "squared ReLU": ("squared-relu",),
    "two levels of context parallelism": ("hierarchical-context-parallel-sizes",),
    "buffers of overlapped tensor parallelism": ("tp-comm-overlap",),
    "several distributed optimizers": ("num-distributed-optimizer-instances",),
    "Megatron's fused cross-entropy": ("cross-entropy-loss-fusion",),
    "blocks of neither GPT-2 nor GPT-NeoX": ("swiglu", "group-query-attention", "normalization", "qk-layernorm"),
    "experts in blocks of GPT-2": ("num-experts",),
    "a batch that grows": ("rampup-batch-size", "step-batch-size-schedule"),
}  # fmt: skip


def read() -> Reading:
    """The rows whose settings the planner has words for."""
    kept = json.loads(FIGURES.read_text())
    left_out, rows = Counter(kept["unread"]), []
    for figure in kept["rows"]:
        settings = kept["settings"][figure["settings"]]
        reason = next(reasons(figure, settings), None)
        if reason:
            left_out[reason] += 1
            continue
        case = {"settings": settings, "test": figure["test"], "date": figure["date"]}
        name, card = f"{figure['test']} {figure['file']}", CARDS[generation(figure["file"])]
        rows.append(Row(name=name, card=card, torch="", case=case, measured=figure["peak"]))
    return Reading(rows, left_out)


def generation(file: str) -> str:
    """The card's: `dev_dgx_gb200_2nd` is of a GB200."""
    found = re.search("a100|h100|gb200", file)
    return found[0] if found else ""


def reasons(figure: dict[str, Any], settings: dict[str, Any]) -> Iterator[str]:
    """Why a row is left out; the error is none."""
    family = figure["test"].partition("/")[0]
    if family != "gpt":
        yield f"{family}: not a plain GPT"
    if not generation(figure["file"]):
        yield "the card is not named"
    yield from (reason for reason, names in NOT_MODELLED.items() if any(settings.get(name) for name in names))
    if settings.get("optimizer", "adam") != "adam":
        yield "another optimizer than Adam"
    if "global-batch-size" not in settings:
        yield "no batch is stated"


def predict(row: Row) -> Prediction:
    """The plan of the last stage, where the tests' own settings of workspaces and blocks take the place of the usual ones."""
    budget = budget_of(row)
    settings, usual = row.case["settings"], next(term.numbers for term in budget.terms if term.name == "cuBLAS")
    size = float(budget.peak_allocated_bytes)
    if stated := settings.get("CUBLAS_WORKSPACE_CONFIG"):
        # :4096:8 is eight of 4 MiB, for each of two threads.
        sizes = [int(number) for number in stated.strip(":").split(":")]
        own = sum(kib * count << 10 for kib, count in zip(sizes[::2], sizes[1::2], strict=True))
        size += 2 * (own - usual["bytes"])
    if settings["transformer-impl"] == "local":
        # No Transformer Engine; and a buffer of the scores' size that Megatron's own attention keeps for all layers.
        heads = settings["num-attention-heads"] / settings.get("tensor-model-parallel-size", 1)
        scores = settings["micro-batch-size"] * heads * settings["seq-length"] ** 2
        size += 2 * scores - usual["own"]
    return Prediction(round(size))


def budget_of(row: Row) -> TrainingBudget:
    """What `tonnage plan train --framework megatron` has of the layout."""
    settings = row.case["settings"]
    tp, pp, cp = (settings.get(f"{name}-parallel-size", 1) for name in ("tensor-model", "pipeline-model", "context"))
    gpus = 4 if row.card == "gb200" and row.case["test"].endswith("_1node") else 8  # as the tests' recipes have it
    data, batch = gpus // (tp * pp * cp), settings["micro-batch-size"]
    part = settings.get("num-layers-per-virtual-pipeline-stage")
    chunks = settings["num-layers"] // (pp * part) if part else settings.get("num-virtual-stages-per-pipeline-rank", 1)
    precision: Precision = "bf16-mixed" if settings.get("bf16") else "fp16-mixed" if settings.get("fp16") else "fp32"
    layout = Configuration(
        framework="megatron", precision=precision,
        zero=1 if settings.get("use-distributed-optimizer") else 0, checkpoint=settings.get("recompute-granularity", "none"),
        attention=kernel(row), sequence_parallel=bool(settings.get("sequence-parallel")), pp_chunks=chunks,
        dropout=settings.get("hidden-dropout", 0.1) > 0, seq=settings["seq-length"], micro_batch=batch,
        accumulate=settings["global-batch-size"] // (batch * data), tp=tp, pp=pp, cp=cp, data=data, shard=data,
    )  # fmt: skip
    return training_budget(shape_of(settings, layout), layout, find_gpu(row.card), stage="last")


def kernel(row: Row) -> AttentionKernel:
    """That Transformer Engine takes: cuDNN's on Hopper, FlashAttention 2 elsewhere, unless the test names one."""
    settings, backend = row.case["settings"], row.case["settings"].get("attention-backend", "auto")
    strict = settings.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == 0
    old = "lts" in row.name.split()[-1] and row.case["date"] < NEW_CONTAINER
    if settings["transformer-impl"] == "local" or backend == "unfused" or (backend == "auto" and strict and old):
        return "eager"
    return "flash" if row.card == "h100" and backend == "auto" else "flash-2"


def shape_of(settings: dict[str, Any], layout: Configuration) -> ModelShape:
    """A GPT-2 as Megatron builds it: its vocabulary is padded, positions may be rotary, biases and dropout may be off."""
    hidden, positions = settings["hidden-size"], settings["max-position-embeddings"]
    rotary = settings.get("position-embedding-type") == "rope" or settings.get("use-rotary-position-embeddings")
    multiple = settings.get("make-vocab-size-divisible-by", 128) * layout.tp
    config = {
        "model_type": "gpt2", "n_embd": hidden, "n_layer": settings["num-layers"], "n_head": settings["num-attention-heads"],
        "n_inner": settings.get("ffn-hidden-size", 4 * hidden), "n_positions": positions,
        "vocab_size": -(-settings.get("vocab-size", GPT2_TOKENS) // multiple) * multiple,
        "tie_word_embeddings": not settings.get("untie-embeddings-and-output-weights"),
    }  # fmt: skip
    shape = from_config(config)
    if rotary:
        tokens_alone = shape.embedding_parameters - positions * hidden
        shape = replace(shape, embedding_parameters=tokens_alone, learned_positions=False)
        if layout.attention != "eager":
            shape = replace(shape, architecture="gpt_neox")  # queries and keys are rotated
    if not layout.dropout:
        shape = replace(shape, architecture="unknown")
    return shape


SOURCE = Source(
    key="megatron",
    title="Megatron-LM's functional tests: layouts of small GPTs on A100, H100 and GB200",
    where="NVIDIA/Megatron-LM d98e8a64dd: tests/functional_tests/test_cases/**/golden_values*.json, model_config.yaml",
    read=read,
    predict=predict,
)
