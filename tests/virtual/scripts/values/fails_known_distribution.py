import torch
from torch.distributions import Normal
x = torch.nn.Linear(4, 4).cuda()(torch.randn(8, 4, device="cuda"))
print(x.sum().item())
Normal(torch.zeros(2, device="cuda"), torch.tensor([-1.0, 1.0], device="cuda"))
