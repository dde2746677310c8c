import torch


def forward(model, x, scale):
    if x.shape[-1] != 4:
        raise ValueError(f"expected 4 features, got {x.shape[-1]}")
    return model(x) * scale


model = torch.nn.Linear(4, 4).cuda()
losses = []
for step in range(3):
    loss = model(torch.randn(8, 4, device="cuda")).square().mean()
    losses.append(loss.item())
    while len(losses) > 2 and losses[-1] > 0:
        forward(model, torch.randn(8, 5, device="cuda"), losses[-1])
