"""One launch of a kernel, as the clock takes it. It does not know who launched it: a script, a plan or a probe."""

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal[
    "matmul", "attention", "convolution", "recurrent", "elementwise", "reduction", "norm", "loss", "indexing", "sorting",
    "optimizer", "copy", "fused", "collective",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A kernel, or a few that always come together.

    What `shape` and `variant` hold is the business of the module that knows the kind: for a product (batch, m, n, k) and which
    factor is transposed, for attention the lengths and heads and whether it is causal. `precision` is what the arithmetic is
    done in ("bf16", "tf32", …). A copy between host and card says so in `variant`. Sizes may be NumPy arrays of one length: the
    kinds that transformers are made of then answer for as many launches at once.
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
