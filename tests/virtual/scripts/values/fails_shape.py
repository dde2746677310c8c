import torch
model = torch.nn.Linear(4, 4).cuda()
total = 0.0
for _ in range(3):
    loss = model(torch.randn(8, 4, device="cuda")).square().mean()
    total += loss.item()
model(torch.randn(8, 5, device="cuda") * total)
