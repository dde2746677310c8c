"""Full-batch graph networks with plain torch: GCN by sparse matmul, GAT by scatter, GraphSAGE by sampling on the host."""

import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F

ap = argparse.ArgumentParser()
ap.add_argument("--model", default="gcn", choices=["gcn", "gat", "sage"])
ap.add_argument("--nodes", type=int, default=170_000)
ap.add_argument("--degree", type=int, default=14)
ap.add_argument("--hidden", type=int, default=256)
ap.add_argument("--layers", type=int, default=3)
ap.add_argument("--heads", type=int, default=4)
ap.add_argument("--format", default="csr", choices=["csr", "coo"])
ap.add_argument("--fanout", type=int, default=15)
ap.add_argument("--seeds", type=int, default=8192)
args = ap.parse_args()
torch.manual_seed(2)
device = "cuda"
N, E = args.nodes, args.nodes * args.degree
src, dst = torch.randint(0, N, (E,)), (torch.rand(E) ** 2 * N).long()
x = torch.randn(N, 128)
y = torch.randint(0, 40, (N,))


def normalised_adjacency(src, dst):
    loops = torch.arange(N)
    i = torch.stack([torch.cat([dst, loops]), torch.cat([src, loops])]).to(device)
    deg = torch.zeros(N, device=device).scatter_add_(0, i[0], torch.ones(i.shape[1], device=device))
    v = deg[i[0]].rsqrt() * deg[i[1]].clamp(min=1).rsqrt()
    A = torch.sparse_coo_tensor(i, v, (N, N)).coalesce()
    return A.to_sparse_csr() if args.format == "csr" else A


class SpMM(torch.autograd.Function):
    """A is constant, so only the dense side needs a gradient (with the transposed matrix kept beside it)."""

    @staticmethod
    def forward(ctx, A, At, h):
        ctx.At = At
        return A @ h

    @staticmethod
    def backward(ctx, g):
        return None, None, ctx.At @ g


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        dims = [128] + [args.hidden] * (args.layers - 1) + [40]
        self.lins = nn.ModuleList(nn.Linear(a, b) for a, b in zip(dims, dims[1:]))
        self.bns = nn.ModuleList(nn.BatchNorm1d(d) for d in dims[1:-1])

    def forward(self, A, At, h):
        for i, lin in enumerate(self.lins):
            h = SpMM.apply(A, At, lin(h))
            if i < len(self.bns):
                h = F.dropout(F.relu(self.bns[i](h)), 0.5, self.training)
        return h


class GATLayer(nn.Module):
    def __init__(self, i, o, heads):
        super().__init__()
        self.h, self.o = heads, o
        self.lin = nn.Linear(i, heads * o, bias=False)
        self.a_src, self.a_dst = nn.Parameter(torch.randn(heads, o) * 0.1), nn.Parameter(torch.randn(heads, o) * 0.1)

    def forward(self, src, dst, h):
        z = self.lin(h).view(-1, self.h, self.o)
        e = F.leaky_relu((z * self.a_src).sum(-1)[src] + (z * self.a_dst).sum(-1)[dst], 0.2)
        m = torch.full((h.shape[0], self.h), -1e9, device=h.device).scatter_reduce(
            0, dst[:, None].expand_as(e), e.detach(), "amax"
        )
        w = (e - m[dst]).exp()
        s = torch.zeros_like(m).index_add_(0, dst, w)
        msg = z[src] * (w / (s[dst] + 1e-9)).unsqueeze(-1)
        return torch.zeros_like(z).index_add(0, dst, msg).flatten(1)


class SAGE(nn.Module):
    def __init__(self):
        super().__init__()
        dims = [128] + [args.hidden] * (args.layers - 1) + [40]
        self.lins = nn.ModuleList(nn.Linear(2 * a, b) for a, b in zip(dims, dims[1:]))

    def forward(self, h, blocks):
        for lin, (s, d, n) in zip(self.lins, blocks):
            agg = torch.zeros(n, h.shape[1], device=h.device).index_reduce(0, d, h[s], "mean", include_self=False)
            h = lin(torch.cat([h[:n], agg], 1))
            h = F.normalize(h.relu(), dim=-1) if lin is not self.lins[-1] else h
        return h


def sample_blocks(order, ptr, nodes):
    blocks = []
    for _ in range(args.layers):
        deg = ptr[nodes + 1] - ptr[nodes]
        pick = (torch.rand(len(nodes), args.fanout) * deg[:, None].clamp(min=1)).long()
        nb = order[(ptr[nodes][:, None] + pick).clamp(max=E - 1)]
        ok = (deg > 0)[:, None].expand_as(nb)
        d = torch.arange(len(nodes))[:, None].expand_as(nb)[ok]
        extra = nb[ok]
        allnodes, inv = torch.unique(torch.cat([nodes, extra]), return_inverse=True)
        first = torch.full((len(allnodes),), -1)
        first[inv[: len(nodes)]] = torch.arange(len(nodes))
        new = (first < 0).nonzero().squeeze(1)
        first[new] = torch.arange(len(nodes), len(nodes) + len(new))
        blocks.insert(0, (first[inv[len(nodes) :]].cuda(), d.cuda(), len(nodes)))
        nodes = torch.cat([nodes, allnodes[new]])
    return nodes, blocks


if args.model == "gcn":
    model = GCN().to(device)
    A, At = normalised_adjacency(src, dst), normalised_adjacency(dst, src)
    feats, labels = x.to(device), y.to(device)
elif args.model == "gat":
    model = nn.ModuleList(
        [GATLayer(128 if i == 0 else args.hidden * args.heads, args.hidden, args.heads) for i in range(args.layers)]
        + [nn.Linear(args.hidden * args.heads, 40)]
    ).to(device)
    feats, labels, s, d = x.to(device), y.to(device), src.to(device), dst.to(device)
else:
    model = SAGE().to(device)
    order = torch.argsort(dst)
    ptr = F.pad(torch.bincount(dst, minlength=N).cumsum(0), (1, 0))
    order = src[order]
opt = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(4):
    model.train()
    opt.zero_grad()
    if args.model == "gcn":
        out, lab = model(A, At, feats), labels
    elif args.model == "gat":
        h = feats
        for layer in model[:-1]:
            h = F.elu(layer(s, d, h))
        out, lab = model[-1](h), labels
    else:
        seeds = torch.randperm(N)[: args.seeds]
        nodes, blocks = sample_blocks(order, ptr, seeds)
        out, lab = model(x[nodes].cuda(), blocks), y[seeds].cuda()
    loss = F.cross_entropy(out, lab)
    loss.backward()
    opt.step()
    print(epoch, loss.item(), (out.argmax(1) == lab).float().mean().item())
