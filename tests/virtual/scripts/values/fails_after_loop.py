import torch
model = torch.nn.Linear(4, 4).cuda()
def fit(steps):
    for step in range(steps):
        loss = model(torch.randn(8, 4, device="cuda")).square().mean()
        if loss.item() < 0.1:
            break
    raise NotImplementedError("saving")
fit(5)
