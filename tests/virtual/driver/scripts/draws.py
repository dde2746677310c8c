"""Draws large tensors of the host, which stay unwritten, and prints what is drawn next."""

import torch

torch.manual_seed(0)
own = torch.Generator().manual_seed(5)
torch.nn.Embedding(3200, 1024)
torch.empty(1024, 1025, dtype=torch.bfloat16).normal_()
torch.empty(1000, 1001, dtype=torch.float64).uniform_()
torch.empty(1 << 20).normal_(generator=own)
print("drawn", torch.randint(1 << 30, (3,)).tolist(), torch.randint(1 << 30, (3,), generator=own).tolist())
