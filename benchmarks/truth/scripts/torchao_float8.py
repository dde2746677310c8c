"""Float8 training with torchao, blocks compiled."""
import argparse

import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import AutoModelForCausalLM, LlamaConfig

p = argparse.ArgumentParser()
p.add_argument("--recipe", default="tensorwise", choices=["tensorwise", "rowwise", "rowwise_with_gw_hp"])
p.add_argument("--eager", action="store_true")
p.add_argument("--checkpoint", action="store_true")
p.add_argument("--layers", type=int, default=4)
p.add_argument("--batch", type=int, default=4)
p.add_argument("--seq", type=int, default=2048)
args = p.parse_args()

torch.manual_seed(0)
config = LlamaConfig(vocab_size=32000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=args.layers,
                     num_attention_heads=16, num_key_value_heads=16, use_cache=False)
model = AutoModelForCausalLM.from_config(config).to("cuda", torch.bfloat16)
convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(args.recipe),
                           module_filter_fn=lambda module, name: name != "lm_head")
if args.checkpoint:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
if not args.eager:
    for layer in model.model.layers:
        layer.compile()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
for step in range(3):
    ids = torch.randint(0, 32000, (args.batch, args.seq), device="cuda")
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item(), torch.cuda.max_memory_allocated() // 2**20)
