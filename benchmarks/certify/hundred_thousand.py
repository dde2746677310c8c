"""Trains for 100,000 steps on lengths that vary: `time tonnage certify --gpu 4090 benchmarks/certify/hundred_thousand.py`."""

import random

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import AutoConfig, AutoModelForCausalLM

STEPS, BATCH, MULTIPLE = 100_000, 8, 64


class Lengths(Dataset):
    def __init__(self):
        draw = random.Random(0)
        self.lengths = [min(max(int(draw.lognormvariate(5, 0.8)), 4), 2048) for _ in range(STEPS * BATCH)]

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, at):
        return self.lengths[at]


def padded(lengths):
    ids = torch.zeros(len(lengths), -(-max(lengths) // MULTIPLE) * MULTIPLE, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


config = AutoConfig.for_model(
    "llama", hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
    vocab_size=32000,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config).cuda()
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
shuffled = torch.Generator().manual_seed(0)
for step, batch in enumerate(DataLoader(Lengths(), BATCH, shuffle=True, collate_fn=padded, generator=shuffled)):
    batch = {name: value.cuda() for name, value in batch.items()}
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if step % 1000 == 0:
        print(step, loss.item(), flush=True)
