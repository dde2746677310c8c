"""A process's settings for torch's arithmetic, which no call records."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Where TF32 may replace FP32. The defaults are torch's: allowed in cuDNN, not in matrix products."""

    tf32_matmul: bool = False
    tf32_convolution: bool = True
