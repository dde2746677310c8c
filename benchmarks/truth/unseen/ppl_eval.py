"""Strided perplexity of a causal LM (after the well-known documentation page)."""

try:
    import torchvision_stub  # noqa: F401
except ImportError:
    pass
import argparse

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

ap = argparse.ArgumentParser()
ap.add_argument("--arch", default="llama", choices=["llama", "neox"])
ap.add_argument("--hidden", type=int, default=2048)
ap.add_argument("--layers", type=int, default=12)
ap.add_argument("--vocab", type=int, default=128256)
ap.add_argument("--max_length", type=int, default=4096)
ap.add_argument("--stride", type=int, default=2048)
ap.add_argument("--tokens", type=int, default=16384)
ap.add_argument("--batch", type=int, default=1)
ap.add_argument("--eager", action="store_true")
ap.add_argument("--grad", action="store_true", help="forgot torch.no_grad()")
args = ap.parse_args()
torch.manual_seed(0)
device = "cuda"
impl = "eager" if args.eager else "sdpa"
torch.set_default_device(device)
if args.arch == "llama":
    cfg = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 4,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=8,
        vocab_size=args.vocab,
        max_position_embeddings=32768,
        attn_implementation=impl,
    )
    model = LlamaForCausalLM(cfg)
else:
    cfg = GPTNeoXConfig(
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 4,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        vocab_size=args.vocab,
        max_position_embeddings=32768,
        attn_implementation=impl,
    )
    model = GPTNeoXForCausalLM(cfg)
model = model.to(torch.float16).to(device).eval()
text = torch.randint(0, args.vocab, (args.batch, args.tokens), device="cpu")
nlls, prev_end = [], 0
for begin in range(0, args.tokens, args.stride):
    end = min(begin + args.max_length, args.tokens)
    trg = end - prev_end
    input_ids = text[:, begin:end].to(device)
    target_ids = input_ids.clone()
    target_ids[:, :-trg] = -100
    with torch.set_grad_enabled(args.grad):
        out = model(input_ids, labels=target_ids)
        nlls.append(out.loss)
    prev_end = end
    if end == args.tokens:
        break
print(torch.exp(torch.stack(nlls).mean().float()).item())
