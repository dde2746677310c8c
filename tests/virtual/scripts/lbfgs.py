import torch
from torch import nn

model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 10)).cuda()
inputs, labels = torch.randn(512, 256, device="cuda"), torch.randint(0, 10, (512,), device="cuda")
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=10, history_size=8)
closures = 0


def closure():
    global closures
    closures += 1
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    return loss


for _ in range(2):
    optimizer.step(closure)
state = optimizer.state[next(model.parameters())]
print(f"closures {closures}, directions {len(state['old_dirs'])}")
