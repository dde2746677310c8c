import torch
class Config: epochs = 0
def train(config):
    loss = torch.nn.Linear(4, 4).cuda()(torch.randn(8, 4, device="cuda")).square().mean()
    best = loss.item()
    if best < 100:
        print("good", best)
    if config.epochs < 1:
        raise ValueError("epochs must be positive")
train(Config())
