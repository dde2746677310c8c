"""Full fine-tuning with the optimizers of bitsandbytes."""
import argparse

import bitsandbytes as bnb
import torch
from transformers import AutoConfig, AutoModelForCausalLM

p = argparse.ArgumentParser()
p.add_argument("--optimizer", default="Adam8bit",
               choices=["Adam8bit", "AdamW8bit", "PagedAdamW8bit", "PagedAdamW32bit", "PagedAdam", "Lion8bit", "AdEMAMix8bit", "SGD8bit"])
p.add_argument("--precision", default="bf16", choices=["fp32", "bf16", "amp-bf16"])
p.add_argument("--stable-embedding", action="store_true")
p.add_argument("--layers", type=int, default=12)
p.add_argument("--batch", type=int, default=4)
p.add_argument("--seq", type=int, default=1024)
args = p.parse_args()

torch.manual_seed(0)
config = AutoConfig.for_model("llama", vocab_size=32000, hidden_size=1536, intermediate_size=4096, num_hidden_layers=args.layers,
                              num_attention_heads=12, num_key_value_heads=12, use_cache=False)
model = AutoModelForCausalLM.from_config(config)
if args.stable_embedding:
    model.model.embed_tokens = bnb.nn.StableEmbedding(32000, 1536)
model = model.to("cuda", torch.bfloat16 if args.precision == "bf16" else torch.float32)
extra = dict(momentum=0.9) if args.optimizer == "SGD8bit" else {}
optimizer = getattr(bnb.optim, args.optimizer)(model.parameters(), lr=1e-4, **extra)
for step in range(3):
    ids = torch.randint(0, 32000, (args.batch, args.seq), device="cuda")
    with torch.autocast("cuda", torch.bfloat16, enabled=args.precision == "amp-bf16"):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item(), torch.cuda.max_memory_allocated() // 2**20)
