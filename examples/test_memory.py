"""A test with a limit on the GPU memory that it needs. It fails, to show how: pytest examples/test_memory.py"""

import pytest
import torch
from torch import nn


@pytest.mark.gpu_memory(limit="1 GiB")
def test_a_step_stays_small() -> None:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(2)))
    net = net.to("cuda")
    inputs = torch.randn(16384, 1024, device="cuda")
    net(inputs).square().mean().backward()
