"""Starts of the engine on the virtual GPU, whose memory is counted though nothing is computed, as JSON.

In a process of its own, which has no other idea of CUDA.
"""

import json
from typing import Any
from unittest.mock import patch

import torch

import tonnage
from tonnage.budget.terms import Term
from tonnage.ledger import Category
from tonnage.serve import Engine, Sampling
from tonnage.serve.config import EngineConfig
from tonnage.serve.models.architecture import architecture_of
from tonnage.serve.models.load import random_decoder
from tonnage.serve.startup import MEASURED, CannotStart
from tonnage.units import GIB, MIB

TINY = {
    "model_type": "qwen3", "vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip
SETTINGS = EngineConfig(budget="8 GiB", context=64, max_seqs=2, batched_tokens=16, eager=True)


def start(settings: EngineConfig = SETTINGS) -> dict[str, Any]:
    """What the card's ledger says, and whether the engine works."""
    engine = Engine.of(random_decoder(architecture_of(TINY), "cuda", torch.bfloat16), settings=settings)
    outputs = engine.generate([[1, 2, 3]] * 3, Sampling(max_tokens=3, ignore_eos=True, logprobs=1))
    graphs = engine.runner._graphs
    return {
        "blocks": engine.card.pool.blocks,
        "measured_bytes": engine.card.measured_bytes,
        "total_bytes": engine.card.total_bytes,
        "by_measurement": MEASURED in {term.source for term in engine.card.reserve},
        "tokens": [len(output.token_ids) for output in outputs],
        "graphs": graphs.sizes if graphs else [],
    }


def start_planned_as(reserve_bytes: int) -> dict[str, Any]:
    """A start whose planner is of another opinion."""
    term = Term(Category.WORKSPACE, "everything", reserve_bytes)
    with patch("tonnage.budget.serving.own_engine.own_reserve", lambda *_: (term,)):
        return start()


def start_with_graphs() -> dict[str, Any]:
    """Plain attention reads lengths on the host, which a graph cannot hold."""
    with patch("tonnage.serve.models.decoder.attend_decode", lambda query, *_, **__: torch.zeros_like(query)):
        return start(EngineConfig(budget="8 GiB", context=64, max_seqs=2, batched_tokens=16))


def start_beyond_the_card() -> str:
    """A pool that was fixed without looking."""
    try:
        start(EngineConfig(blocks=200 * GIB // 4096, context=64, max_seqs=2, batched_tokens=16, eager=True))
    except CannotStart as error:
        return error.words
    return ""


if __name__ == "__main__":
    with tonnage.virtual_gpu("h200"):
        starts = {
            "planned": start(),
            "reserve too small": start_planned_as(700 * MIB),
            "reserve too large": start_planned_as(5 * GIB),
            "graphs": start_with_graphs(),
            "beyond the card": start_beyond_the_card(),
        }
    print(json.dumps(starts))
