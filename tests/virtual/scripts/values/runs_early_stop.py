import torch

model = torch.nn.Linear(4, 4).cuda()
best, bad = float("inf"), 0
for epoch in range(20):
    loss = model(torch.randn(8, 4, device="cuda")).square().mean()
    loss.backward()
    if loss.item() < best - 0.1:
        best, bad = loss.item(), 0
    else:
        bad += 1
    if bad > 3:
        break
