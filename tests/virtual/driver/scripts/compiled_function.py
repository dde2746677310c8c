"""A compiled function that holds forward and loss: no module is called outside of it."""

import torch
from torch import nn

WIDTH, BATCH = 1024, 4096

net = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU(), nn.Linear(WIDTH, WIDTH, bias=False)).cuda()
optimizer = torch.optim.AdamW(net.parameters())


@torch.compile(backend="aot_eager")
def loss_of(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(net(x), target)


for _ in range(3):
    loss_of(torch.randn(BATCH, WIDTH, device="cuda"), torch.randn(BATCH, WIDTH, device="cuda")).backward()
    optimizer.step()
    optimizer.zero_grad()
