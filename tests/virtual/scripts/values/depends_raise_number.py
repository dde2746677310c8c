import torch
loss = torch.nn.Linear(4, 4).cuda()(torch.randn(8, 4, device="cuda")).square().mean()
print(loss.item())
if loss.item() > 0.5:
    raise ValueError("diverged")
