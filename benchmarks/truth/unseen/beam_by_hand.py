"""Decoder-only generation with a hand-made KV cache: greedy, nucleus, or beam search."""

import argparse
import torch
from torch import nn
import torch.nn.functional as F


class Attn(nn.Module):
    def __init__(self, d, h, kv):
        super().__init__()
        self.h, self.kv, self.hd = h, kv, d // h
        self.q, self.k, self.v, self.o = (
            nn.Linear(d, d, False),
            nn.Linear(d, kv * self.hd, False),
            nn.Linear(d, kv * self.hd, False),
            nn.Linear(d, d, False),
        )

    def forward(self, x, cache):
        B, T, D = x.shape
        q = self.q(x).view(B, T, self.h, self.hd).transpose(1, 2)
        k = self.k(x).view(B, T, self.kv, self.hd).transpose(1, 2)
        v = self.v(x).view(B, T, self.kv, self.hd).transpose(1, 2)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        cache = (k, v)
        rep = self.h // self.kv
        k, v = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=T > 1)
        return self.o(out.transpose(1, 2).reshape(B, T, D)), cache


class Layer(nn.Module):
    def __init__(self, d, h, kv):
        super().__init__()
        self.n1, self.n2, self.attn = nn.RMSNorm(d), nn.RMSNorm(d), Attn(d, h, kv)
        self.up, self.gate, self.down = (
            nn.Linear(d, 3 * d, False),
            nn.Linear(d, 3 * d, False),
            nn.Linear(3 * d, d, False),
        )

    def forward(self, x, cache):
        a, cache = self.attn(self.n1(x), cache)
        x = x + a
        y = self.n2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y)), cache


class LM(nn.Module):
    def __init__(self, V=50000, d=2048, h=16, kv=4, layers=16):
        super().__init__()
        self.emb = nn.Embedding(V, d)
        self.layers = nn.ModuleList(Layer(d, h, kv) for _ in range(layers))
        self.norm = nn.RMSNorm(d)

    def forward(self, ids, past=None):
        x = self.emb(ids)
        past = past or [None] * len(self.layers)
        new = []
        for l, c in zip(self.layers, past):
            x, c = l(x, c)
            new.append(c)
        return F.linear(self.norm(x[:, -1:]), self.emb.weight).squeeze(1).float(), new


@torch.inference_mode()
def beam_search(m, ids, n, width):
    B = ids.shape[0]
    logits, past = m(ids)
    logp, tok = logits.log_softmax(-1).topk(width, -1)
    past = [(k.repeat_interleave(width, 0), v.repeat_interleave(width, 0)) for k, v in past]
    seqs, scores = torch.cat([ids.repeat_interleave(width, 0), tok.view(-1, 1)], 1), logp.view(-1)
    for _ in range(n - 1):
        logits, past = m(seqs[:, -1:], past)
        total = scores[:, None] + logits.log_softmax(-1)
        V = total.shape[-1]
        scores, flat = total.view(B, -1).topk(width, -1)
        src = (flat // V + torch.arange(B, device=ids.device)[:, None] * width).view(-1)
        seqs = torch.cat([seqs[src], (flat % V).view(-1, 1)], 1)
        scores = scores.view(-1)
        past = [(k.index_select(0, src), v.index_select(0, src)) for k, v in past]
    return seqs


@torch.no_grad()
def nucleus(m, ids, n, p, temperature=0.8):
    past, cur = None, ids
    for _ in range(n):
        logits, past = m(cur, past)
        srt, idx = (logits / temperature).sort(descending=True, dim=-1)
        probs = srt.softmax(-1)
        drop = probs.cumsum(-1) - probs > p
        probs = probs.masked_fill(drop, 0.0)
        cur = idx.gather(-1, torch.multinomial(probs / probs.sum(-1, keepdim=True), 1))
        ids = torch.cat([ids, cur], 1)
    return ids


if __name__ == "__main__":
    a = argparse.ArgumentParser()
    a.add_argument("--mode", default="beam")
    a.add_argument("--batch", type=int, default=16)
    a.add_argument("--prompt", type=int, default=512)
    a.add_argument("--new", type=int, default=64)
    a.add_argument("--width", type=int, default=4)
    a.add_argument("--layers", type=int, default=16)
    a = a.parse_args()
    torch.manual_seed(5)
    torch.set_default_dtype(torch.float16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        m = LM(layers=a.layers).eval()
        prompt = torch.randint(0, 50000, (a.batch, a.prompt))
        for p in m.parameters():
            p.data.mul_(0.5)
        out = beam_search(m, prompt, a.new, a.width) if a.mode == "beam" else nucleus(m, prompt, a.new, 0.9)
    print(out.shape, out[0, -8:].tolist())
