# Int8 weight-only base + LoRA adapters, without any library. The base is quantised per row and dequantised on the fly.
import argparse, math
import torch, torch.nn as nn, torch.nn.functional as F


class Int8Matmul(torch.autograd.Function):
    """y = x @ dequant(w).T, saving only the int8 weight (not the dequantised copy)."""

    @staticmethod
    def forward(ctx, x, w8, scale):
        ctx.save_for_backward(w8, scale)
        return x @ (w8.to(x.dtype) * scale.to(x.dtype)).t()

    @staticmethod
    def backward(ctx, g):
        w8, scale = ctx.saved_tensors
        return g @ (w8.to(g.dtype) * scale.to(g.dtype)), None, None


class QLinear(nn.Module):
    def __init__(self, lin, r=16, alpha=32, naive=False):
        super().__init__()
        w = lin.weight.data
        s = w.abs().amax(1, keepdim=True) / 127
        self.register_buffer("w8", torch.round(w / s).to(torch.int8))
        self.register_buffer("scale", s.float())
        self.A = nn.Parameter(torch.randn(r, w.shape[1], device=w.device) / math.sqrt(w.shape[1]))
        self.B = nn.Parameter(torch.zeros(w.shape[0], r, device=w.device))
        self.k, self.naive = alpha / r, naive

    def forward(self, x):
        if self.naive:
            base = F.linear(x, self.w8.to(x.dtype) * self.scale.to(x.dtype))
        else:
            base = Int8Matmul.apply(x, self.w8, self.scale)
        return base + (F.dropout(x, 0.05, self.training) @ self.A.to(x.dtype).t() @ self.B.to(x.dtype).t()) * self.k


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.fc1, self.fc2 = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = [t.view(B, T, self.h, D // self.h).transpose(1, 2) for t in self.qkv(self.ln1(x)).split(D, -1)]
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, D))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self, V, d, L):
        super().__init__()
        self.wte = nn.Embedding(V, d)
        self.blocks = nn.ModuleList([Block(d, d // 128) for _ in range(L)])
        self.ln = nn.LayerNorm(d)
        self.head = nn.Linear(d, V, bias=False)

    def forward(self, i):
        x = self.wte(i)
        for b in self.blocks:
            x = b(x)
        return self.head(self.ln(x))


def quantise(m, naive):
    for n, c in m.named_children():
        if isinstance(c, nn.Linear) and n != "head":
            setattr(m, n, QLinear(c, naive=naive).to(c.weight.device))
        else:
            quantise(c, naive)


p = argparse.ArgumentParser()
p.add_argument("--dim", type=int, default=4096)
p.add_argument("--layers", type=int, default=8)
p.add_argument("--bs", type=int, default=4)
p.add_argument("--len", type=int, default=1024)
p.add_argument("--naive", action="store_true")
p.add_argument("--infer", action="store_true")
a = p.parse_args()
torch.manual_seed(0)
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    m = GPT(32000, a.dim, a.layers)
m.requires_grad_(False)
print("before", torch.cuda.memory_allocated() >> 20)
quantise(m, a.naive)
torch.cuda.empty_cache()
print("after", torch.cuda.memory_allocated() >> 20)
if a.infer:
    m.eval()
    with torch.inference_mode():
        for n in (1, 17, 256, a.len):
            print(m(torch.randint(0, 32000, (a.bs, n), device="cuda")).argmax(-1).shape)
else:
    tr = [q for q in m.parameters() if q.requires_grad]
    opt = torch.optim.AdamW(tr, lr=2e-4)
    for s in range(3):
        ids = torch.randint(0, 32000, (a.bs, a.len), device="cuda")
        loss = F.cross_entropy(m(ids)[:, :-1].float().reshape(-1, 32000), ids[:, 1:].reshape(-1))
        loss.backward()
        opt.step()
        opt.zero_grad()
        print(s, loss.item())
