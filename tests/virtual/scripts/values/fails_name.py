import torch
loss = torch.nn.Linear(4, 4).cuda()(torch.randn(8, 4, device="cuda")).square().mean()
history = [loss.item()]
if loss.item() > 0.5:
    print(historie)
