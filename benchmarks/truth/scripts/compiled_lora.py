"""LoRA fine-tuning with peft under torch.compile."""
import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

p = argparse.ArgumentParser()
p.add_argument("--rank", type=int, default=16)
p.add_argument("--dropout", type=float, default=0.0)
p.add_argument("--layers", type=int, default=6)
p.add_argument("--batch", type=int, default=4)
p.add_argument("--seq", type=int, default=2048)
p.add_argument("--checkpoint", action="store_true")
p.add_argument("--mode", default="default")
args = p.parse_args()

config = LlamaConfig(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=args.layers,
                     num_attention_heads=32, num_key_value_heads=32, use_cache=False)
torch.manual_seed(0)
with torch.device("cuda"):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
if args.checkpoint:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
model = get_peft_model(model, LoraConfig(r=args.rank, lora_alpha=32, lora_dropout=args.dropout, target_modules="all-linear",
                                         task_type="CAUSAL_LM")).to("cuda")
model.print_trainable_parameters()
compiled = torch.compile(model, mode=args.mode)
optimizer = torch.optim.AdamW([q for q in model.parameters() if q.requires_grad], lr=2e-4)
for step in range(4):
    ids = torch.randint(0, 32000, (args.batch, args.seq)).to("cuda")
    torch.compiler.cudagraph_mark_step_begin()
    loss = compiled(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
