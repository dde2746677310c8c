"""A training loop with Hugging Face accelerate: mixed precision, accumulation, a real data loader."""
import argparse

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoConfig, AutoModelForSequenceClassification, get_linear_schedule_with_warmup

p = argparse.ArgumentParser()
p.add_argument("--model", default="roberta", choices=["roberta", "deberta-v2", "albert", "modernbert", "gpt2"])
p.add_argument("--mixed", default="bf16", choices=["no", "fp16", "bf16"])
p.add_argument("--batch", type=int, default=16)
p.add_argument("--seq", type=int, default=192)
p.add_argument("--accumulate", type=int, default=2)
args = p.parse_args()

accelerator = Accelerator(mixed_precision=args.mixed, gradient_accumulation_steps=args.accumulate)
config = AutoConfig.for_model(args.model, num_hidden_layers=8, num_labels=5, pad_token_id=0)
model = AutoModelForSequenceClassification.from_config(config)
data = TensorDataset(torch.randint(5, 1000, (args.batch * 8, args.seq)), torch.randint(0, 5, (args.batch * 8,)))
loader = DataLoader(data, batch_size=args.batch, shuffle=True, num_workers=2, pin_memory=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
schedule = get_linear_schedule_with_warmup(optimizer, 2, 10)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
model.train()
for ids, labels in loader:
    with accelerator.accumulate(model):
        loss = model(input_ids=ids, labels=labels).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
accelerator.print("done", loss.item())
