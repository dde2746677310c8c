"""Tensors that are used three times: autograd adds their gradients in place where it holds the only reference."""

import torch


def allocations_of_backward(x, loss):
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    loss.backward()
    return torch.cuda.memory_stats()["allocation.all.allocated"] - before


x = torch.randn(1 << 20, device="cuda", requires_grad=True)
h = x.sin()
print("allocations", allocations_of_backward(x, (h * h * h + h * 2).sum()))

# Gradients whose values are known.
x = torch.ones(8, device="cuda", requires_grad=True)
h = x * 2
print("known", allocations_of_backward(x, (h * 3).sum() + (h * 5).sum() + (h * 7).sum()))
