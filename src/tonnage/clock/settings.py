"""What a script has set that decides which kernels run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """PyTorch's own defaults."""

    tf32_matmul: bool = False
    tf32_convolution: bool = True
