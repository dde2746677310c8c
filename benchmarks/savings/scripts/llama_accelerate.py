"""A small Llama in FP32 with accelerate."""

import torch
from accelerate import Accelerator
from switches import adam, applied, token_loss
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

args = applied(batch=8, seq=512)
half = args.apply == "batch"
accelerator = Accelerator(
    gradient_accumulation_steps=2 if half else 1, mixed_precision="bf16" if args.apply == "autocast" else "no"
)
config = LlamaConfig(
    vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=10,
    num_attention_heads=16, num_key_value_heads=8, use_cache=False,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config)
if args.apply == "checkpoint":
    model.gradient_checkpointing_enable()
loader = DataLoader(
    [torch.zeros(args.seq, dtype=torch.int64)] * args.batch * 3, args.batch // 2 if half else args.batch
)
model, optimizer, loader = accelerator.prepare(model, adam(model.parameters(), args.apply), loader)
model.train()
for ids in loader:
    with accelerator.accumulate(model):
        if args.apply == "chunked":
            loss = token_loss(model.lm_head, model.model(input_ids=ids).last_hidden_state, ids, "chunked")
        else:
            loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
