# clustering + nearest-neighbour search on embeddings, the way a data scientist would do it on one GPU
import sys
import numpy as np
import torch

n = int(float(sys.argv[1])) if len(sys.argv) > 1 else 2_000_000
d = int(sys.argv[2]) if len(sys.argv) > 2 else 128
k = int(sys.argv[3]) if len(sys.argv) > 3 else 1024
chunk = int(sys.argv[4]) if len(sys.argv) > 4 else 65536

rng = np.random.default_rng(0)
torch.cuda.manual_seed(0)
x = torch.randn(n, d, device="cuda")
x /= x.norm(dim=1, keepdim=True)
cent = x[torch.as_tensor(rng.choice(n, k, replace=False)).cuda()].clone()

for it in range(3):
    assign = torch.empty(n, dtype=torch.long, device="cuda")
    inertia = 0.0
    for i in range(0, n, chunk):
        dist = torch.cdist(x[i : i + chunk], cent)
        m, assign[i : i + chunk] = dist.min(1)
        inertia += m.pow(2).sum().item()
    counts = torch.bincount(assign, minlength=k)
    cent = torch.zeros_like(cent).index_add_(0, assign, x) / counts.clamp(min=1)[:, None]
    empty = counts == 0
    if empty.any():
        cent[empty] = x[torch.randint(0, n, (int(empty.sum()),), device="cuda")]
    print(it, inertia / n, int(counts.max()), int(counts.min()))

# pairwise duplicates inside clusters
order = torch.argsort(assign)
xs = x[order]
print("sorted copy", torch.cuda.memory_allocated() // 2**20)

# brute-force top-k for a few queries
q = x[torch.as_tensor(rng.integers(0, n, 2048)).cuda()]
best_v = torch.full((2048, 10), -1.0, device="cuda")
best_i = torch.zeros(2048, 10, dtype=torch.long, device="cuda")
for i in range(0, n, chunk):
    s = q @ x[i : i + chunk].T
    v, j = s.topk(10, dim=1)
    v, p = torch.cat([best_v, v], 1).topk(10, dim=1)
    best_i = torch.cat([best_i, j + i], 1).gather(1, p)
    best_v = v
print(best_v.mean().item(), torch.unique(best_i).numel())
u, s, v = torch.pca_lowrank(x[:200000], q=32, niter=2)
print(s[:5].cpu().numpy(), torch.histc(xs.flatten()[:10_000_000], bins=50).argmax().item())
