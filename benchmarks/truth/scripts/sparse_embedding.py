"""Train a recommender whose embedding tables have sparse gradients."""
import argparse

import torch
import torch.nn.functional as F
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--rows", type=int, default=2_000_000)
p.add_argument("--tables", type=int, default=4)
p.add_argument("--dim", type=int, default=128)
p.add_argument("--batch", type=int, default=16384)
p.add_argument("--per-bag", type=int, default=20)
p.add_argument("--optimizer", default="sparse-adam", choices=["sparse-adam", "sgd", "adagrad"])
p.add_argument("--plain", action="store_true", help="nn.Embedding and a mean, and not nn.EmbeddingBag")
args = p.parse_args()

torch.manual_seed(0)
kind = nn.Embedding if args.plain else nn.EmbeddingBag
tables = nn.ModuleList(kind(args.rows, args.dim, sparse=True, device="cuda") for _ in range(args.tables))
top = nn.Sequential(nn.Linear(args.dim * args.tables + 13, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1)).cuda()
kinds = {"sparse-adam": torch.optim.SparseAdam, "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
sparse = kinds[args.optimizer](list(tables.parameters()), lr=0.01)
dense = torch.optim.Adam(top.parameters(), lr=1e-3)
for step in range(3):
    bags = torch.randint(0, args.rows, (args.tables, args.batch, args.per_bag)).cuda()
    numbers, clicks = torch.randn(args.batch, 13).cuda(), torch.randint(0, 2, (args.batch,)).float().cuda()
    looked = [table(bag).mean(1) if args.plain else table(bag) for table, bag in zip(tables, bags)]
    loss = F.binary_cross_entropy_with_logits(top(torch.cat([*looked, numbers], 1)).squeeze(1), clicks)
    loss.backward()
    sparse.step()
    dense.step()
    sparse.zero_grad()
    dense.zero_grad()
    print(step, loss.item(), torch.cuda.max_memory_allocated() // 2**20)
