import torch
x = torch.nn.Linear(4, 4).cuda()(torch.randn(8, 4, device="cuda"))
scores = x.softmax(-1).max(-1).values
picked = x[scores > 0.9]
picked.view(3, 5)
