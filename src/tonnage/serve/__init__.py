"""Serve a model from a paged KV cache with continuous batching: `Engine(path).generate(prompts, Sampling(...))`.

Imports point one way: server → engine → model_runner → models → kernels; the scheduler knows none of them, and no torch.
"""

from typing import TYPE_CHECKING

from tonnage.serve.config import EngineConfig
from tonnage.serve.sampling import Output, Sampling, TokenLogprob

if TYPE_CHECKING:
    from tonnage.serve.engine import Engine

__all__ = ["Engine", "EngineConfig", "Output", "Sampling", "TokenLogprob"]


def __getattr__(name: str) -> object:
    """Import `Engine`, and with it torch, on first use."""
    if name == "Engine":
        from tonnage.serve.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
