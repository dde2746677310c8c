import torch
def check(value):
    if not value < 0.5:
        raise ValueError("bad value")
def train(x):
    try:
        check(round(x.mean().item(), 3))
    except ValueError as e:
        raise RuntimeError("training failed") from e
train(torch.nn.Linear(4, 4).cuda()(torch.randn(8, 4, device="cuda")))
