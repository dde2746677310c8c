"""Train small language models of many families from their Hugging Face configurations."""

import argparse

import torch
from transformers import AutoConfig, AutoModelForCausalLM

COMMON = dict(vocab_size=32000, hidden_size=1024, num_hidden_layers=8, num_attention_heads=16, max_position_embeddings=4096)
LLAMA_LIKE = dict(**COMMON, intermediate_size=2816, num_key_value_heads=4)
FAMILIES = {
    "falcon": dict(**COMMON, new_decoder_architecture=False, multi_query=True, parallel_attn=True, bias=False),
    "phi3": dict(**LLAMA_LIKE, pad_token_id=0),
    "phi": dict(**COMMON, intermediate_size=4096),
    "gemma2": dict(**LLAMA_LIKE, head_dim=64, sliding_window=1024),
    "gemma3_text": dict(**LLAMA_LIKE, head_dim=64, sliding_window=512),
    "mistral": dict(**LLAMA_LIKE, sliding_window=1024),
    "olmo2": dict(**LLAMA_LIKE),
    "starcoder2": dict(**LLAMA_LIKE),
    "cohere": dict(**LLAMA_LIKE),
    "stablelm": dict(**LLAMA_LIKE),
    "bloom": dict(vocab_size=32000, hidden_size=1024, n_layer=8, n_head=16),
    "gpt_neo": dict(vocab_size=32000, hidden_size=1024, num_layers=8, num_heads=16, attention_types=[[["global", "local"], 4]]),
    "gptj": dict(vocab_size=32000, n_embd=1024, n_layer=8, n_head=16, rotary_dim=64),
    "qwen3_moe": dict(**LLAMA_LIKE, moe_intermediate_size=512, num_experts=16, num_experts_per_tok=4, head_dim=64),
    "mamba": dict(vocab_size=32000, hidden_size=512, num_hidden_layers=4),
}

p = argparse.ArgumentParser()
p.add_argument("--family", default="mistral", choices=FAMILIES)
p.add_argument("--batch", type=int, default=4)
p.add_argument("--seq", type=int, default=1024)
p.add_argument("--precision", default="bf16", choices=["fp32", "bf16", "amp-bf16"])
p.add_argument("--padding", action="store_true")
args = p.parse_args()

config = AutoConfig.for_model(args.family, **FAMILIES[args.family])
config.use_cache = False
model = AutoModelForCausalLM.from_config(config)
if args.precision == "bf16":
    model = model.to(torch.bfloat16)
model = model.cuda().train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(3):
    ids = torch.randint(5, 32000, (args.batch, args.seq), device="cuda")
    mask = torch.ones_like(ids)
    if args.padding:
        mask[: args.batch // 2, : args.seq // 4] = 0
    with torch.autocast("cuda", torch.bfloat16, enabled=args.precision == "amp-bf16"):
        loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
