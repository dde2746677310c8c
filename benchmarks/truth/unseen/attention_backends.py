"""Attention in many shapes: SDPA backends with masks, flex attention with block masks, jagged tensors."""

import argparse
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

B = {
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
ap = argparse.ArgumentParser()
ap.add_argument("--kind", default="efficient", choices=[*B, "flex", "flex-window", "jagged", "alibi"])
ap.add_argument("--mask", default="none", choices=["none", "causal", "padding", "float"])
ap.add_argument("--batch", type=int, default=8)
ap.add_argument("--seq", type=int, default=2048)
ap.add_argument("--d", type=int, default=1024)
ap.add_argument("--layers", type=int, default=6)
ap.add_argument("--dropout", type=float, default=0.0)
ap.add_argument("--infer", action="store_true")
a = ap.parse_args()
torch.manual_seed(0)
rng = random.Random(0)
H = a.d // 64


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(a.d, 3 * a.d), nn.Linear(a.d, a.d)

    def forward(self, x, extra):
        if x.is_nested:
            q, k, v = (t.unflatten(-1, [H, 64]).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
            return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, H, 64).permute(2, 0, 3, 1, 4)
        if a.kind.startswith("flex") or a.kind == "alibi":
            y = flex(q, k, v, **extra)
        else:
            with sdpa_kernel(B[a.kind]):
                y = F.scaled_dot_product_attention(q, k, v, dropout_p=a.dropout if self.training else 0.0, **extra)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2, self.att = nn.LayerNorm(a.d), nn.LayerNorm(a.d), Attention()
        self.mlp = nn.Sequential(nn.Linear(a.d, 4 * a.d), nn.GELU(), nn.Linear(4 * a.d, a.d))

    def forward(self, x, extra):
        x = x + self.att(self.n1(x), extra)
        return x + self.mlp(self.n2(x))


lengths = [rng.randint(a.seq // 4, a.seq) for _ in range(a.batch)]
if a.kind.startswith("flex") or a.kind == "alibi":
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    flex = torch.compile(flex_attention)
    docs = torch.zeros(a.batch, a.seq, dtype=torch.int32)
    for i in range(a.batch):
        for cut in sorted(rng.sample(range(1, a.seq), 6)):
            docs[i, cut:] += 1
    docs = docs.cuda()

    def document_causal(b, h, q, kv):
        return (q >= kv) & (docs[b, q] == docs[b, kv])

    def window(b, h, q, kv):
        return (q >= kv) & (q - kv <= 256)

    extra = {}
    if a.kind != "alibi":
        extra["block_mask"] = create_block_mask(
            document_causal if a.kind == "flex" else window,
            a.batch if a.kind == "flex" else None,
            None,
            a.seq,
            a.seq,
            device="cuda",
        )
    else:
        slopes = torch.exp2(-torch.arange(1, H + 1, device="cuda") * 8.0 / H)
        extra["score_mod"] = lambda score, b, h, q, kv: score + slopes[h] * (kv - q)
elif a.mask == "causal":
    extra = {"is_causal": True}
elif a.mask == "padding":
    extra = {"attn_mask": (torch.arange(a.seq)[None] < torch.tensor(lengths)[:, None])[:, None, None, :].cuda()}
elif a.mask == "float":
    extra = {"attn_mask": torch.randn(1, H, a.seq, a.seq, device="cuda", dtype=torch.bfloat16)}
else:
    extra = {}

model = nn.ModuleList([Block() for _ in range(a.layers)]).to("cuda", torch.bfloat16)
opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
model.train(not a.infer)
for step in range(3):
    if a.kind == "jagged":
        x = torch.nested.nested_tensor(
            [torch.randn(n, a.d) for n in lengths], layout=torch.jagged, device="cuda", dtype=torch.bfloat16
        )
    else:
        x = torch.randn(a.batch, a.seq, a.d, device="cuda", dtype=torch.bfloat16)
    with torch.set_grad_enabled(not a.infer):
        h = x
        for block in model:
            h = block(h, extra)
    value = (h.values() if h.is_nested else h).float().pow(2).mean()
    if not a.infer:
        value.backward()
        opt.step()
        opt.zero_grad()
    print(step, value.item())
