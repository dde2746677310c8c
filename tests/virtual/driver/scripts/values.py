"""Reads values back from the card: what is known is right, what follows from random numbers is its share."""

import torch

ids = torch.tensor([1, 2, 0, 5]).cuda()
mask = ids != 0
assert mask.tolist() == [True, True, False, True]
assert mask.sum().item() == 3 and ids[mask].shape == (3,) and ids.max().item() == 5
assert (ids * 2 + 1).tolist() == [3, 5, 1, 11] and (1 - ids).tolist() == [0, -1, 1, -4]
assert torch.nonzero(ids).tolist() == [[0], [1], [3]] and ids.unique().tolist() == [0, 1, 2, 5]

ids.add_(1)
ids.clamp_(max=3)
assert ids.tolist() == [2, 3, 1, 3]
assert torch.repeat_interleave(ids).shape == (9,) and torch.bincount(ids).shape == (4,)

numbers = torch.rand(1000, device="cuda")
assert numbers[numbers > 0.2].shape == (800,) and (numbers > 0.2).sum().item() == 800
assert torch.randint(0, 50, (1000,), device="cuda").unique().numel() == 50
# Random probabilities are one half on average, and so is the share that they let through; a random mask has its own.
assert torch.bernoulli(torch.rand(1000, device="cuda")).bool().sum().item() == 500
assert torch.bernoulli((numbers > 0.2).float()).bool().sum().item() == 800

scores = torch.randn(4, 8, device="cuda")
chosen = scores.topk(2).indices.tolist()
assert all(0 <= a < 8 and 0 <= b < 8 and a != b for a, b in chosen)
assert not torch.isinf(scores).any().item() and torch.isfinite(scores).all().item()

# One side decides, whatever the other is.
unknown = scores.argmax(-1).float().sin() > 0.5
assert (unknown | torch.ones(4, dtype=torch.bool, device="cuda")).all().item()
assert not (unknown & torch.zeros(4, dtype=torch.bool, device="cuda")).any().item()

# A computed number equals none that is written down, and a mask of numbers is known where it was filled.
norm = scores.norm()
assert norm != 0 and not bool(torch.eq(norm, 1))
ones = torch.ones(64, 512, device="cuda")
assert ones.bool().all().item() and (ones.masked_fill(ones > 0, float("-inf")) < 0).all().item()

# A block that is gone says nothing of the next one at its address.
for _ in range(4):
    drawn = torch.multinomial(scores.softmax(-1), 1)
    assert drawn.min().item() >= 0 and drawn.max().item() < 8

# Experts chosen by unknown scores are chosen evenly, also where there are many tokens.
scores = torch.nn.Linear(64, 16, device="cuda")(torch.empty(16384, 64, device="cuda"))
chosen = torch.bincount(scores.topk(2, -1).indices.flatten(), minlength=16)
assert 1800 < int(chosen.min()) <= int(chosen.max()) < 2300, chosen.tolist()

scaler = torch.amp.GradScaler()
layer = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
scaler.scale(layer(torch.randn(2, 4, device="cuda")).sum()).backward()
scaler.step(optimizer)
scaler.update()
assert scaler.get_scale() == 65536.0
print("all as it should be", scores.sum().item())
