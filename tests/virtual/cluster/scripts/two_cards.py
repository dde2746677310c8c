"""One process that uses two cards, without a process group."""

import torch
from torch import nn

model = nn.DataParallel(nn.Linear(256, 256).cuda())
kept = [torch.zeros(1 << size, device=f"cuda:{size % 2}") for size in range(18, 24)]
model(torch.randn(64, 256, device="cuda")).sum().backward()
