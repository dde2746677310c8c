"""Asks for torch.compile, which the virtual GPU runs eagerly where Triton is missing."""

import torch
from torch import nn

model = torch.compile(nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8)).cuda())
model(torch.randn(32, 512, device="cuda")).sum().backward()


@torch.compile(mode="max-autotune")
def scaled(x):
    return x * 2


print(scaled(torch.ones(3, device="cuda")).shape)
