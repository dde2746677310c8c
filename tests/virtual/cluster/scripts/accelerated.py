"""Hugging Face accelerate under torchrun, by name: ddp, fsdp2."""

import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from small_model import Network, batches, loss_of

plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
)
accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin if sys.argv[1] == "fsdp2" else None)
model = Network()
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, data = accelerator.prepare(model, optimizer, batches())
for (x,) in data:
    loss = loss_of(model, x)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
if accelerator.is_main_process:
    print("losses of", len(accelerator.gather(loss.detach())), "ranks")
else:
    accelerator.gather(loss.detach())
accelerator.end_training()
