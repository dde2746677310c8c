import torch
loss = torch.nn.Linear(4, 4).cuda()(torch.randn(8, 4, device="cuda")).square().mean()
total, batches = loss.item(), 0
print(total / batches)
