"""Generate text with compiled decoding: Hugging Face's static cache, or a cache and a loop written by hand."""
import argparse

import torch
import torch.nn.functional as F
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--way", default="transformers", choices=["transformers", "by-hand"])
p.add_argument("--mode", default="reduce-overhead", choices=["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
p.add_argument("--cache", default="static", choices=["static", "hybrid"])
p.add_argument("--batch", type=int, default=8)
p.add_argument("--prompt", type=int, default=512)
p.add_argument("--new", type=int, default=64)
p.add_argument("--layers", type=int, default=8)
args = p.parse_args()
DIM, HEADS, KV, VOCAB = 2048, 32, 8, 128256
torch.manual_seed(0)


def transformers_generate():
    from transformers import AutoModelForCausalLM, CompileConfig, LlamaConfig

    config = LlamaConfig(vocab_size=VOCAB, hidden_size=DIM, intermediate_size=8192, num_hidden_layers=args.layers,
                         num_attention_heads=HEADS, num_key_value_heads=KV, max_position_embeddings=131072)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to("cuda").eval()
    ids = torch.randint(5, 32000, (args.batch, args.prompt), device="cuda")
    extra = dict(compile_config=CompileConfig(mode=args.mode, fullgraph=False))
    for _ in range(2):
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.new, min_new_tokens=args.new,
                             do_sample=False, cache_implementation=args.cache, pad_token_id=0, **extra)
        print(out.shape, torch.cuda.max_memory_allocated() // 2**20)


class Layer(nn.Module):
    def __init__(self, length):
        super().__init__()
        size = DIM // HEADS
        self.n1, self.n2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, DIM + 2 * KV * size, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.w1, self.w3, self.w2 = nn.Linear(DIM, 8192, bias=False), nn.Linear(DIM, 8192, bias=False), nn.Linear(8192, DIM, bias=False)
        self.register_buffer("k", torch.zeros(args.batch, KV, length, size))
        self.register_buffer("v", torch.zeros(args.batch, KV, length, size))

    def forward(self, x, where, mask):
        b, t, _ = x.shape
        size = DIM // HEADS
        q, k, v = self.qkv(self.n1(x)).split([DIM, KV * size, KV * size], dim=-1)
        q, k, v = (y.view(b, t, -1, size).transpose(1, 2) for y in (q, k, v))
        self.k[:, :, where] = k
        self.v[:, :, where] = v
        y = F.scaled_dot_product_attention(q, self.k, self.v, attn_mask=mask, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, DIM))
        y = self.n2(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Decoder(nn.Module):
    def __init__(self, length):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(VOCAB, DIM), nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.layers = nn.ModuleList(Layer(length) for _ in range(args.layers))
        self.register_buffer("mask", torch.ones(length, length, dtype=torch.bool).tril())

    def forward(self, ids, where):
        x, mask = self.embed(ids), self.mask[None, None, where]
        for layer in self.layers:
            x = layer(x, where, mask)
        return self.head(self.norm(x[:, -1:]))


def decode_one(model, ids, where):
    probabilities = torch.softmax(model(ids, where)[:, -1].float() / 0.8, dim=-1)
    noise = torch.empty_like(probabilities).exponential_(1)
    return torch.argmax(probabilities / noise, dim=-1, keepdim=True)


@torch.inference_mode()
def by_hand():
    model = Decoder(args.prompt + args.new).to("cuda", torch.bfloat16).eval()
    step = torch.compile(decode_one, mode=args.mode, fullgraph=True)
    ids = torch.randint(5, 32000, (args.batch, args.prompt), device="cuda")
    token = decode_one(model, ids, torch.arange(args.prompt, device="cuda"))
    tokens = [token]
    for i in range(args.prompt, args.prompt + args.new - 1):
        torch.compiler.cudagraph_mark_step_begin()
        token = step(model, token, torch.tensor([i], device="cuda")).clone()
        tokens.append(token)
    print(torch.cat(tokens, 1).shape, torch.cuda.max_memory_allocated() // 2**20)


transformers_generate() if args.way == "transformers" else by_hand()
