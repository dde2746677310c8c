"""Real data loader workers (forked processes) and pinned batches."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((256,), float(index)), index % 10


model = nn.Linear(256, 10).cuda()
optimizer = torch.optim.AdamW(model.parameters())
seen = 0
for features, labels in DataLoader(Numbers(), batch_size=16, num_workers=2, pin_memory=True):
    assert features.is_pinned()
    loss = nn.functional.cross_entropy(model(features.cuda(non_blocking=True)), labels.cuda(non_blocking=True))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    seen += len(labels)
print("seen", seen)
