import torch, sys
loss = torch.nn.Linear(4, 4).cuda()(torch.randn(8, 4, device="cuda")).square().mean()
print(loss.item())
sys.exit(7)
