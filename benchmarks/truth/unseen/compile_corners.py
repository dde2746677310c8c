"""Things people do with torch.compile besides wrapping a model."""

import argparse
import random

import torch
import torch._dynamo
import torch.nn as nn
import torch.nn.functional as F

ap = argparse.ArgumentParser()
ap.add_argument(
    "what",
    choices=[
        "loss-fn",
        "graph-break",
        "dynamic",
        "compiled-autograd",
        "full-step",
        "reduce-overhead",
        "regional",
        "custom-op",
        "jvp",
    ],
)
ap.add_argument("--d", type=int, default=1024)
ap.add_argument("--batch", type=int, default=32)
ap.add_argument("--seq", type=int, default=512)
ap.add_argument("--steps", type=int, default=5)
a = ap.parse_args()
torch.manual_seed(0)
random.seed(0)
dev = "cuda" if torch.cuda.is_available() else "cpu"
V = 32000


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.SiLU(), nn.Linear(4 * d, d))

    def forward(self, x):
        q, k, v = self.qkv(self.n1(x)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.n2(x))


class Noisy(nn.Module):
    """Prints and reads a value in the middle, so the graph breaks."""

    def __init__(self, d):
        super().__init__()
        self.a, self.b = Layer(d), Layer(d)
        self.seen = []

    def forward(self, x):
        x = self.a(x)
        norm = x.float().norm().item()
        self.seen.append(norm)
        if len(self.seen) % 2 == 0:
            x = x * 0.5
        return self.b(x)


class LM(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.emb, self.body, self.head = nn.Embedding(V, a.d), body, nn.Linear(a.d, V)

    def forward(self, ids):
        return self.head(self.body(self.emb(ids)))


def chunked_loss(h, w, y, chunks: int = 4):
    total = h.new_zeros(())
    for hc, yc in zip(h.chunk(chunks), y.chunk(chunks)):
        total = total + F.cross_entropy((hc @ w.t()).float(), yc, reduction="sum")
    return total / y.numel()


body = nn.Sequential(*[Layer(a.d) for _ in range(4)])
if a.what == "graph-break":
    body = nn.Sequential(Noisy(a.d), Noisy(a.d))
model = LM(body).to(dev)
opt = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=a.what == "full-step")


def data(T=None):
    return torch.randint(0, V, (a.batch, T or a.seq)).to(dev)


def plain(fn, ids):
    with torch.autocast(dev, torch.bfloat16):
        return F.cross_entropy(fn(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


if a.what == "loss-fn":
    loss_fn = torch.compile(chunked_loss, fullgraph=True)
    for _ in range(a.steps):
        ids = data()
        with torch.autocast(dev, torch.bfloat16):
            h = model.body(model.emb(ids))[:, :-1].flatten(0, 1)
            loss = loss_fn(h, model.head.weight, ids[:, 1:].flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
elif a.what in ("graph-break", "reduce-overhead", "dynamic"):
    fn = torch.compile(
        model,
        mode="reduce-overhead" if a.what == "reduce-overhead" else None,
        dynamic=True if a.what == "dynamic" else None,
    )
    for _ in range(a.steps):
        loss = plain(fn, data(random.randint(a.seq // 2, a.seq) if a.what == "dynamic" else None))
        loss.backward()
        opt.step()
        opt.zero_grad()
elif a.what == "compiled-autograd":
    torch._dynamo.config.compiled_autograd = True

    @torch.compile
    def train(ids):
        loss = plain(model, ids)
        loss.backward()
        return loss

    for _ in range(a.steps):
        loss = train(data())
        opt.step()
        opt.zero_grad(set_to_none=True)
elif a.what == "full-step":
    fwd = torch.compile(model)
    step = torch.compile(lambda: opt.step())
    for _ in range(a.steps):
        loss = plain(fwd, data())
        loss.backward()
        step()
        opt.zero_grad(set_to_none=True)
elif a.what == "regional":
    for layer in model.body:
        layer.compile(fullgraph=True)
    for _ in range(a.steps):
        loss = plain(model, data())
        loss.backward()
        opt.step()
        opt.zero_grad()
elif a.what == "custom-op":

    @torch.library.custom_op("mine::soft_cap", mutates_args=())
    def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
        return torch.tanh(x / cap) * cap

    @soft_cap.register_fake
    def _(x, cap):
        return torch.empty_like(x)

    def setup(ctx, inputs, output):
        ctx.cap = inputs[1]
        ctx.save_for_backward(output)

    def back(ctx, g):
        (y,) = ctx.saved_tensors
        return g * (1 - (y / ctx.cap) ** 2), None

    soft_cap.register_autograd(back, setup_context=setup)

    @torch.compile(fullgraph=True)
    def fn(ids):
        return soft_cap(model(ids), 30.0)

    for _ in range(a.steps):
        loss = plain(fn, data())
        loss.backward()
        opt.step()
        opt.zero_grad()
else:  # jvp
    mlp = nn.Sequential(nn.Linear(a.d, 4 * a.d), nn.Tanh(), nn.Linear(4 * a.d, a.d)).to(dev)
    params = {k: v.detach() for k, v in mlp.named_parameters()}

    @torch.compile
    def directional(params, x, v):
        return torch.func.jvp(lambda z: torch.func.functional_call(mlp, params, (z,)), (x,), (v,))

    for _ in range(a.steps):
        x = torch.randn(a.batch * a.seq, a.d, device=dev)
        y, t = directional(params, x, torch.randn_like(x))
        jac = torch.func.vmap(torch.func.jacrev(lambda z: torch.func.functional_call(mlp, params, (z,))))(x[:8])
    loss = y.mean() + t.mean() + jac.mean()
print(a.what, float(loss))
