"""Catches out of memory and halves its batch until it fits, as many training scripts do."""

import torch
from torch import nn

model = nn.Linear(8192, 8192).cuda()
batch = 2**24
while True:
    try:
        model(torch.randn(batch, 8192, device="cuda")).sum().backward()
        break
    except torch.cuda.OutOfMemoryError:
        model.zero_grad()
        batch //= 2
print("batch", batch)
