"""Frequencies and tables, held against transformers' own."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from serve.models.tiny import transformers
from tonnage.serve.models.rope import inverse_frequencies, make_tables, read_rope

SCALED: list[Mapping[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 8192},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 0.7,
     "beta_fast": 16, "beta_slow": 2, "truncate": False},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "attention_factor": 0.8},
]  # fmt: skip


@pytest.mark.parametrize("written", SCALED, ids=lambda written: written["rope_type"])
@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("dim", [64, 128])
def test_tables_are_those_of_transformers(written: Mapping[str, Any], theta: float, dim: int) -> None:
    positions = 4096
    config = transformers.LlamaConfig(
        hidden_size=4 * dim, num_attention_heads=4, max_position_embeddings=positions,
        rope_parameters={**written, "rope_theta": theta},
    )  # fmt: skip
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    rope = read_rope({**written, "rope_theta": theta}, dim, 1.0, positions)
    assert torch.equal(inverse_frequencies(rope), theirs.inv_freq)
    cos, sin = theirs(torch.zeros(1), torch.arange(positions)[None])
    ours = make_tables(rope, positions, torch.device("cpu"))
    for mine, expected in zip(ours, (cos, sin), strict=True):
        torch.testing.assert_close(mine, expected[0, :, : dim // 2], atol=1e-6, rtol=0)
