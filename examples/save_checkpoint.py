"""Trains a small model for ten steps and saves a checkpoint, as many scripts do."""

import os

import torch
from torch import nn

model = nn.Sequential(nn.Linear(4096, 16384), nn.ReLU(), nn.Linear(16384, 4096)).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
for step in range(10):
    loss = model(torch.randn(256, 4096, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1}: loss {loss.item():.3f}")

os.makedirs("checkpoint-10", exist_ok=True)
torch.save(model.state_dict(), "checkpoint-10/model.pt")
torch.save(optimizer.state_dict(), "checkpoint-10/optimizer.pt")
