"""Train a Hugging Face model under torch.compile."""
import argparse

import torch
from transformers import (AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForMaskedLM,
                          AutoModelForSeq2SeqLM)

MODELS = {
    "llama": dict(vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=4, num_attention_heads=32,
                  num_key_value_heads=8, max_position_embeddings=131072, tie_word_embeddings=True),
    "qwen3": dict(vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=6, num_attention_heads=16,
                  num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=True),
    "gemma3_text": dict(vocab_size=262144, hidden_size=1152, intermediate_size=6912, num_hidden_layers=6, num_attention_heads=4,
                        num_key_value_heads=1, head_dim=256, sliding_window=512),
    "gpt2": dict(n_layer=6),
    "bert": dict(num_hidden_layers=6),
    "modernbert": dict(num_hidden_layers=6, pad_token_id=0),
    "t5": dict(vocab_size=32128, d_model=768, d_ff=3072, num_layers=3, num_decoder_layers=3, num_heads=12,
               decoder_start_token_id=0),
    "vit": dict(num_hidden_layers=6, num_labels=1000),
}

p = argparse.ArgumentParser()
p.add_argument("--model", default="llama", choices=MODELS)
p.add_argument("--layers", action="store_true", help="compile every decoder layer by itself")
p.add_argument("--mode", default="default")
p.add_argument("--fullgraph", action="store_true")
p.add_argument("--precision", default="bf16", choices=["fp32", "bf16", "amp-bf16", "amp-fp16"])
p.add_argument("--attention", default="sdpa", choices=["sdpa", "eager", "flex_attention"])
p.add_argument("--checkpoint", action="store_true")
p.add_argument("--padding", action="store_true")
p.add_argument("--varied", action="store_true", help="batches of different lengths")
p.add_argument("--batch", type=int, default=4)
p.add_argument("--seq", type=int, default=2048)
args = p.parse_args()

config = AutoConfig.for_model(args.model, **MODELS[args.model], attn_implementation=args.attention)
config.use_cache = False
kind = {"vit": AutoModelForImageClassification, "bert": AutoModelForMaskedLM, "modernbert": AutoModelForMaskedLM,
        "t5": AutoModelForSeq2SeqLM}.get(args.model, AutoModelForCausalLM)
torch.manual_seed(0)
model = kind.from_config(config)
if args.precision == "bf16":
    model = model.to(torch.bfloat16)
model = model.to("cuda").train()
if args.checkpoint:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cuda", enabled=args.precision == "amp-fp16")
amp = {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}.get(args.precision)
if args.layers:
    for layer in model.model.layers:
        layer.compile(mode=args.mode, fullgraph=args.fullgraph)
    run = model
else:
    run = torch.compile(model, mode=args.mode, fullgraph=args.fullgraph)


def batch_of(step):
    if args.model == "vit":
        images = torch.randn(args.batch, 3, 224, 224, device="cuda", dtype=next(model.parameters()).dtype)
        return dict(pixel_values=images, labels=torch.randint(0, 1000, (args.batch,), device="cuda"))
    length = args.seq - 64 * step if args.varied else args.seq
    ids = torch.randint(5, 30000, (args.batch, length), device="cuda")
    mask = torch.ones_like(ids)
    if args.padding:
        mask[: args.batch // 2, length * 3 // 4:] = 0
        return dict(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
    return dict(input_ids=ids, labels=ids)


for step in range(4):
    batch = batch_of(step)
    torch.compiler.cudagraph_mark_step_begin()
    with torch.autocast("cuda", dtype=amp, enabled=amp is not None):
        loss = run(**batch).loss
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(step, loss.item(), torch.cuda.max_memory_allocated() // 2**20)
