"""Branches on values of the GPU: lengths that came from the host, flags and losses that nobody computed."""

import torch

lengths = torch.tensor([3, 9, 4]).cuda()
padded = torch.zeros(len(lengths), int(lengths.max()), device="cuda")
assert padded.shape == (3, 9)
mask = torch.arange(9, device="cuda")[None] < lengths[:, None]
assert padded[mask].shape == (16,)
hidden = torch.randn(64, 64, device="cuda")
loss = (hidden @ hidden).mean()
if not torch.isfinite(loss):
    raise SystemExit("the loss is not finite")
rounds = 0
while not (hidden.sum() > 0.5):
    rounds += 1
    if rounds == 50_000:
        raise SystemExit("waited for ever")
print("rounds", rounds > 0)
