import torch
x = torch.nn.Linear(4, 4).cuda()(torch.randn(8, 4, device="cuda"))
hits = int((x.round().long() * 7).sum().item())
print(8 / hits)
