"""A training loop through accelerate, with mixed precision and accumulation."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 10))
optimizer = torch.optim.AdamW(model.parameters())
data = DataLoader(TensorDataset(torch.randn(64, 128), torch.randint(0, 10, (64,))), batch_size=16)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for features, labels in data:
    with accelerator.accumulate(model):
        loss = nn.functional.cross_entropy(model(features), labels)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
print("device", accelerator.device)
