"""Train with Liger's fused Triton kernels."""
import argparse

import torch
from liger_kernel.transformers import (LigerFusedLinearCrossEntropyLoss, apply_liger_kernel_to_llama, apply_liger_kernel_to_qwen3)
from transformers import AutoConfig, AutoModelForCausalLM

p = argparse.ArgumentParser()
p.add_argument("--model", default="llama", choices=["llama", "qwen3"])
p.add_argument("--loss", default="fused-linear", choices=["fused-linear", "cross-entropy", "by-hand"])
p.add_argument("--precision", default="bf16", choices=["bf16", "amp-bf16"])
p.add_argument("--checkpoint", action="store_true")
p.add_argument("--layers", type=int, default=8)
p.add_argument("--batch", type=int, default=4)
p.add_argument("--seq", type=int, default=2048)
args = p.parse_args()

apply = {"llama": apply_liger_kernel_to_llama, "qwen3": apply_liger_kernel_to_qwen3}[args.model]
apply(rope=True, rms_norm=True, swiglu=True, cross_entropy=args.loss == "cross-entropy",
      fused_linear_cross_entropy=args.loss == "fused-linear")
sizes = dict(vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=args.layers, num_attention_heads=32,
             num_key_value_heads=8, head_dim=64, max_position_embeddings=131072)
config = AutoConfig.for_model(args.model, **sizes)
config.use_cache = False
torch.manual_seed(0)
with torch.device("cuda"):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if args.precision == "bf16" else torch.float32).train()
if args.checkpoint:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
criterion = LigerFusedLinearCrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
for step in range(3):
    ids = torch.randint(0, config.vocab_size, (args.batch, args.seq), device="cuda")
    with torch.autocast("cuda", torch.bfloat16, enabled=args.precision == "amp-bf16"):
        if args.loss == "by-hand":
            hidden = model.model(input_ids=ids).last_hidden_state[:, :-1].reshape(-1, config.hidden_size)
            loss = criterion(model.lm_head.weight, hidden, ids[:, 1:].reshape(-1))
        else:
            loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item(), torch.cuda.max_memory_allocated() // 2**20)
