"""One kernel launch, as the clock takes it, whether from a script, a plan or a probe."""

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal[
    "matmul", "attention", "convolution", "recurrent", "elementwise", "reduction", "norm", "loss", "indexing", "sorting",
    "optimizer", "copy", "fused", "collective",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A kernel, or several that always run together.

    The module of the kind defines `shape` and `variant`: for a product (batch, m, n, k) and which factor is transposed,
    for attention the lengths and heads and whether it is causal. `precision` is that of the arithmetic ("bf16", "tf32",
    …). A copy between host and GPU says so in `variant`. Sizes may be NumPy arrays of one length: the kinds used by
    transformers then evaluate that many launches at once.
    """

    kind: Kind
    name: str
    shape: tuple[Any, ...] = ()
    precision: str = "fp32"
    moved_bytes: Any = 0.0
    operations: Any = 0.0
    variant: str = ""
    kernels: Any = 1
    stream: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Where TF32 may replace FP32. The defaults are torch's: allowed in cuDNN, not in matrix products."""

    tf32_matmul: bool = False
    tf32_convolution: bool = True
