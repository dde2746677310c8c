import torch

model = torch.nn.Linear(4, 4).cuda()
loss, rounds = model(torch.randn(8, 4, device="cuda")).square().mean(), 0
while loss.item() > 1e-3:
    rounds += 1
    if rounds % 5000 == 0:
        loss = model(torch.randn(8, 4, device="cuda")).square().mean()
print("never")
