"""The options of an engine, read by startup, scheduler and model runner. Knows no torch."""

from dataclasses import dataclass
from typing import Literal

from tonnage.errors import RequestError
from tonnage.units import parse_bytes

Weights = Literal["int8", "fp8"]
FLOAT_FORMATS = ("fp32", "fp16", "bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The options of an engine."""

    budget: float | str = 0.9  # a share of the device's memory (on the CPU of what is free), or a size like "60 GiB"
    context: int | None = None  # tokens of the longest sequence; None: the model's limit, or what the cache holds
    kv: str | None = None  # "bf16", "fp16", "fp32" or "fp8"; None: the compute dtype
    weights: Weights | None = None  # "int8" or "fp8": quantize the weights
    max_seqs: int = 256  # sequences that run at once
    batched_tokens: int = 8192  # tokens per step
    block: int = 16  # tokens per cache block
    blocks: int | None = None  # number of cache blocks, regardless of the budget
    prefix_cache: bool = True  # reuse KV blocks of common prefixes
    swap: int | str = 0  # host memory for preempted sequences, such as "8 GiB"; 0: they are recomputed
    eager: bool = False  # no CUDA graphs
    seed: int = 0  # for requests without one
    max_waiting: int = 1024  # queue length; more sequences are refused

    def __post_init__(self) -> None:
        for name in ("context", "max_seqs", "batched_tokens", "block"):
            number = getattr(self, name)
            least = 2 if name == "context" else 1
            if number is not None and number < least:
                raise RequestError(f"{name} is {number}.", hint=f"Give {name} at least {least}.")
        if self.blocks is not None and self.blocks < 2:
            raise RequestError(f"blocks is {self.blocks}.", hint="Give at least 2: one of them is never used.")
        if self.kv not in (None, "fp8", *FLOAT_FORMATS):
            raise RequestError(f"A KV cache in {self.kv!r} is not known.", hint=f"Use fp8, {', '.join(FLOAT_FORMATS)}.")

    @property
    def rows(self) -> int:
        """Most sequences that one step decodes."""
        return min(self.max_seqs, self.batched_tokens)

    @property
    def swap_bytes(self) -> int:
        """Host memory for preempted sequences."""
        return parse_bytes(self.swap) if isinstance(self.swap, str) else self.swap
