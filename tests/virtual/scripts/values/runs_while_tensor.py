import torch
model = torch.nn.Linear(4, 4).cuda()
x = torch.randn(8, 4, device="cuda")
loss = model(x).square().mean()
n = 0
while loss > 1e-6:
    n += 1
    if n % 1000 == 0: loss = model(x).square().mean()
print("rounds", n)
