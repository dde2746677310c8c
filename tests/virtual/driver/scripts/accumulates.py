"""A tensor that is used three times: autograd adds its gradients in place where it holds the only reference."""

import torch

x = torch.randn(1 << 20, device="cuda", requires_grad=True)
h = x.sin()
loss = (h * h * h + h * 2).sum()
before = torch.cuda.memory_stats()["allocation.all.allocated"]
loss.backward()
print("allocations", torch.cuda.memory_stats()["allocation.all.allocated"] - before)
