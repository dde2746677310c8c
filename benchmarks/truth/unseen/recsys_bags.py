# DLRM-ish click model: weighted embedding bags of random length, feature crosses, row-wise adagrad written by hand.
import argparse
import numpy as np
import torch
import torch.nn as nn

ap = argparse.ArgumentParser()
ap.add_argument("--rows", type=int, default=1_000_000)
ap.add_argument("--tables", type=int, default=8)
ap.add_argument("--dim", type=int, default=128)
ap.add_argument("--batch", type=int, default=16384)
ap.add_argument("--sparse", action="store_true")
ap.add_argument("--hot", type=int, default=20)
args = ap.parse_args()
np.random.seed(123)
torch.manual_seed(123)
dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class DLRM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.ModuleList(
            [
                nn.EmbeddingBag(
                    args.rows, args.dim, mode="sum", sparse=args.sparse, include_last_offset=True, device=dev
                )
                for _ in range(args.tables)
            ]
        )
        self.bot = nn.Sequential(
            nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, args.dim), nn.ReLU()
        )
        n = args.tables + 1
        self.top = nn.Sequential(
            nn.Linear(n * (n - 1) // 2 + args.dim, 1024),
            nn.ReLU(),
            nn.Linear(1024, 1024),
            nn.ReLU(),
            nn.Linear(1024, 1),
        )
        self.register_buffer("tri", torch.tril_indices(n, n, -1), persistent=False)

    def forward(self, dense, sparse):
        x = self.bot(dense)
        feats = [x] + [e(i, o, per_sample_weights=w) for e, (i, o, w) in zip(self.emb, sparse)]
        T = torch.stack(feats, 1)
        Z = torch.bmm(T, T.transpose(1, 2))[:, self.tri[0], self.tri[1]]
        return self.top(torch.cat([x, Z], 1)).squeeze(1)


class RowWiseAdagrad:
    def __init__(self, params, lr=0.05):
        self.params, self.lr = list(params), lr
        self.acc = [torch.zeros(p.shape[0], device=p.device) for p in self.params]

    @torch.no_grad()
    def step(self):
        for p, a in zip(self.params, self.acc):
            if p.grad is None:
                continue
            if p.grad.is_sparse:
                g = p.grad.coalesce()
                rows, vals = g.indices()[0], g.values()
                a.index_add_(0, rows, vals.pow(2).mean(1))
                p.index_add_(0, rows, vals * (-self.lr / (a[rows].sqrt() + 1e-8))[:, None])
            else:
                a += p.grad.pow(2).mean(1)
                p -= self.lr * p.grad / (a.sqrt() + 1e-8)[:, None]
            p.grad = None


def make_batch():
    dense = torch.from_numpy(np.random.rand(args.batch, 13).astype(np.float32)).to(dev)
    sparse = []
    for _ in range(args.tables):
        lens = np.random.geometric(1 / args.hot, args.batch)
        off = np.concatenate([[0], lens.cumsum()])
        idx = (np.random.rand(off[-1]) ** 3 * args.rows).astype(np.int64)
        sparse.append(
            (torch.as_tensor(idx, device=dev), torch.as_tensor(off, device=dev), torch.rand(off[-1], device=dev))
        )
    return dense, sparse, torch.from_numpy((np.random.rand(args.batch) < 0.2).astype(np.float32)).to(dev)


model = DLRM().to(dev)
dense_params = [p for n, p in model.named_parameters() if not n.startswith("emb")]
opt, emb_opt = torch.optim.SGD(dense_params, lr=0.1), RowWiseAdagrad(model.emb.parameters())
scores = []
for it in range(4):
    dense, sparse, label = make_batch()
    out = model(dense, sparse)
    loss = nn.functional.binary_cross_entropy_with_logits(out, label)
    opt.zero_grad()
    loss.backward()
    opt.step()
    emb_opt.step()
    scores.append(out.detach().sigmoid().cpu().numpy())
    uniq = sum(torch.unique(i).numel() for i, _, _ in sparse)
    print(it, loss.item(), uniq)
print(np.concatenate(scores).mean())
