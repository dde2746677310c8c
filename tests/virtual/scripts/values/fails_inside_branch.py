import torch


def save(model, folder):
    if not folder:
        raise ValueError("no folder to save to")
    torch.save(model, folder)


best = 10.0
model = torch.nn.Linear(4, 4).cuda()
loss = model(torch.randn(8, 4, device="cuda")).square().mean()
if loss.item() < best:
    save(model, "")
