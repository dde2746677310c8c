"""Full fine-tuning with torchao's quantised and offloaded optimizers."""
import argparse

import torch
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8, CPUOffloadOptimizer
from transformers import AutoConfig, AutoModelForCausalLM

p = argparse.ArgumentParser()
p.add_argument("--optimizer", default="8bit", choices=["8bit", "4bit", "fp8", "offload"])
p.add_argument("--stochastic", action="store_true", help="bf16 weights with stochastic rounding")
p.add_argument("--offload-gradients", action="store_true")
p.add_argument("--layers", type=int, default=8)
p.add_argument("--batch", type=int, default=4)
p.add_argument("--seq", type=int, default=1024)
args = p.parse_args()

torch.manual_seed(0)
config = AutoConfig.for_model("llama", vocab_size=32000, hidden_size=1536, intermediate_size=4096, num_hidden_layers=args.layers,
                              num_attention_heads=12, num_key_value_heads=12, use_cache=False)
model = AutoModelForCausalLM.from_config(config).to("cuda", torch.bfloat16)
if args.optimizer == "offload":
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, offload_gradients=args.offload_gradients, fused=True)
else:
    kind = {"8bit": AdamW8bit, "4bit": AdamW4bit, "fp8": AdamWFp8}[args.optimizer]
    optimizer = kind(model.parameters(), lr=1e-4, bf16_stochastic_round=args.stochastic)
for step in range(3):
    ids = torch.randint(0, 32000, (args.batch, args.seq), device="cuda")
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item(), torch.cuda.max_memory_allocated() // 2**20)
