"""Message passing on a random graph with index_add, scatter and gather; a recommender with embedding bags."""
import argparse

import torch
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--task", choices=["graph", "bags", "sparse", "experts", "policy"], default="graph")
p.add_argument("--nodes", type=int, default=50000)
p.add_argument("--dim", type=int, default=256)
args = p.parse_args()


class Graph(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.embed = nn.Embedding(args.nodes, d)
        self.message, self.update, self.gate = nn.Linear(2 * d, d), nn.GRUCell(d, d), nn.Linear(2 * d, 1)

    def forward(self, edges):
        h = self.embed.weight
        for _ in range(3):
            pair = torch.cat([h[edges[0]], h[edges[1]]], 1)
            weight = torch.exp(self.gate(pair))
            total = torch.zeros(args.nodes, 1, device=h.device).scatter_add_(0, edges[1][:, None], weight)
            message = torch.relu(self.message(pair)) * (weight / total[edges[1]])
            h = self.update(torch.zeros_like(h).index_add(0, edges[1], message), h)
        return h.mean()


class Bags(nn.Module):
    def __init__(self, d, sparse):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(args.nodes, d, mode="sum", sparse=sparse) for _ in range(8))
        self.top = nn.Sequential(nn.Linear(8 * d, 512), nn.ReLU(), nn.Linear(512, 1))

    def forward(self, ids):
        return self.top(torch.cat([table(ids) for table in self.tables], 1)).sigmoid().mean()


class Experts(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.router = nn.Linear(d, 16)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(d, 4 * d), nn.SiLU(), nn.Linear(4 * d, d)) for _ in range(16))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        capacity = 2 * len(x) // 16
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            scores = torch.where(chosen == number, weights, 0).amax(-1)
            top, rows = scores.topk(capacity)
            out = out.index_add(0, rows, expert(x[rows]) * top[:, None])
        return out.square().mean()


class Policy(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.body, self.value = nn.Sequential(nn.Linear(64, d), nn.Tanh(), nn.Linear(d, 18)), nn.Linear(64, 1)

    def forward(self, states):
        choice = torch.distributions.Categorical(logits=self.body(states))
        action = choice.sample()
        rewards = torch.rand(len(states), device=states.device).flip(0).cumsum(0).flip(0)
        advantage = rewards - self.value(states).squeeze(1)
        return (-choice.log_prob(action) * advantage.detach()).mean() + advantage.square().mean() - 0.01 * choice.entropy().mean()


if args.task == "graph":
    model, make = Graph(args.dim), lambda: torch.randint(0, args.nodes, (2, 8 * args.nodes), device="cuda")
elif args.task in ("bags", "sparse"):
    model, make = Bags(args.dim, args.task == "sparse"), lambda: torch.randint(0, args.nodes, (4096, 20), device="cuda")
elif args.task == "experts":
    model, make = Experts(args.dim), lambda: torch.randn(args.nodes, args.dim, device="cuda")
else:
    model, make = Policy(args.dim), lambda: torch.randn(args.nodes, 64, device="cuda")
model.cuda()
kind = torch.optim.SparseAdam if args.task == "sparse" else torch.optim.Adam
optimizer = kind([p for p in model.parameters() if args.task != "sparse" or p.shape[0] == args.nodes], lr=1e-3)
for step in range(3):
    loss = model(make())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
