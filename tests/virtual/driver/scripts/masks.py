"""Trains behind a mask that vmap makes anew in each step, and prints the memory that is in use then."""

import torch
from torch.nn.attention.flex_attention import create_block_mask

model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(5):
    mask = create_block_mask(lambda b, h, q, k: (q >= k) | (k < 256), None, None, 2048, 2048)
    print(torch.cuda.memory_allocated())
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
