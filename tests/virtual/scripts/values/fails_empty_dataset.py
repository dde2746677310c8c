import torch
losses = []
model = torch.nn.Linear(4, 4).cuda()
for x in []:
    losses.append(model(x).mean().item())
warm = model(torch.randn(8, 4, device="cuda")).mean().item()
if not losses:
    raise ValueError("the data set is empty")
