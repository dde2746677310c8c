import torch
class EarlyStopping:
    def __init__(self, patience=3):
        self.patience, self.counter, self.best = patience, 0, None
    def __call__(self, value):
        if self.best is None or value < self.best - 0.1:
            self.best = value; self.counter = 0
        else:
            self.counter += 1
        if self.counter >= self.patience:
            raise RuntimeError("no improvement")
model = torch.nn.Linear(4, 4).cuda(); stop = EarlyStopping()
for epoch in range(10):
    loss = model(torch.randn(8, 4, device="cuda")).square().mean()
    loss.backward()
    stop(loss.item())
