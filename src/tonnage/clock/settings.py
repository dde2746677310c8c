"""What a process allows of torch's arithmetic, which no call records."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Where TF32 may stand in for FP32. The defaults are torch's own: cuDNN may, matrix products may not."""

    tf32_matmul: bool = False
    tf32_convolution: bool = True
