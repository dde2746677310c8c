"""Exact and sparse Gaussian-process regression in double precision, and some dense linear algebra."""

import argparse
import math

import torch

parser = argparse.ArgumentParser()
parser.add_argument("-n", type=int, default=8000)
parser.add_argument("-d", type=int, default=8)
parser.add_argument("--what", choices=["exact", "nystrom", "pca", "whiten"], default="exact")
parser.add_argument("--lbfgs", action="store_true")
parser.add_argument("--float32", action="store_true")
args = parser.parse_args()

torch.set_default_dtype(torch.float32 if args.float32 else torch.float64)
device = torch.device("cuda")
gen = torch.Generator(device=device).manual_seed(10)
X = torch.randn(args.n, args.d, device=device, generator=gen)
y = torch.sin(X.sum(1)) + 0.1 * torch.randn(args.n, device=device, generator=gen)


class GP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.raw_ls = torch.nn.Parameter(torch.zeros(args.d))
        self.raw_var = torch.nn.Parameter(torch.zeros(()))
        self.raw_noise = torch.nn.Parameter(torch.tensor(-2.0))

    def kernel(self, a, b):
        ls = torch.nn.functional.softplus(self.raw_ls)
        d = torch.cdist(a / ls, b / ls)
        s = math.sqrt(5.0) * d
        return torch.nn.functional.softplus(self.raw_var) * (1 + s + s**2 / 3) * torch.exp(-s)

    def nll(self):
        K = self.kernel(X, X) + (torch.nn.functional.softplus(self.raw_noise) + 1e-3) * torch.eye(args.n, device=device)
        L = torch.linalg.cholesky(K)
        alpha = torch.cholesky_solve(y[:, None], L)
        return 0.5 * (y @ alpha.squeeze(1)) + L.diagonal().log().sum() + 0.5 * args.n * math.log(2 * math.pi)

    def nystrom(self, m=1024):
        Z = X[torch.randperm(args.n, device=device, generator=gen)[:m]]
        Kzz = self.kernel(Z, Z) + 1e-2 * torch.eye(m, device=device)
        A = torch.linalg.solve_triangular(torch.linalg.cholesky(Kzz), self.kernel(Z, X), upper=False)
        noise = torch.nn.functional.softplus(self.raw_noise) + 1e-3
        B = torch.eye(m, device=device) + A @ A.T / noise
        LB = torch.linalg.cholesky(B)
        c = torch.linalg.solve_triangular(LB, (A @ y[:, None]) / noise, upper=False)
        return 0.5 * args.n * noise.log() + LB.diagonal().log().sum() + 0.5 * (y @ y) / noise - 0.5 * (c**2).sum()


if args.what in ("exact", "nystrom"):
    gp = GP().to(device)
    objective = gp.nll if args.what == "exact" else gp.nystrom
    if args.lbfgs:
        opt = torch.optim.LBFGS(gp.parameters(), lr=0.1, max_iter=4, max_eval=4)

        def closure():
            opt.zero_grad()
            value = objective()
            value.backward()
            return value

        print(opt.step(closure).item())
    else:
        opt = torch.optim.Adam(gp.parameters(), lr=0.05)
        history = []
        for _ in range(4):
            opt.zero_grad()
            value = objective()
            value.backward()
            opt.step()
            history.append(value.item())
        print(history)
    with torch.no_grad():
        Xs = torch.randn(2000, args.d, device=device, generator=gen)
        Ks = gp.kernel(Xs, X)
        w = torch.linalg.solve(
            gp.kernel(X[:4000], X[:4000]) + 0.1 * torch.eye(min(4000, args.n), device=device), y[:4000]
        )
        print((Ks[:, :4000] @ w).std().item(), torch.special.ndtr(Ks.mean(1)).mean().item())
elif args.what == "pca":
    M = torch.randn(args.n, 1024, device=device, generator=gen)
    M -= M.mean(0)
    U, S, Vh = torch.linalg.svd(M, full_matrices=False)
    q, r = torch.linalg.qr(M.T @ M)
    low = torch.svd_lowrank(M, q=64)
    print(
        S[:3].tolist(),
        r.diagonal()[:3].tolist(),
        low[1][:3].tolist(),
        torch.linalg.matrix_norm(U @ torch.diag(S) @ Vh - M).item(),
    )
else:  # batched ZCA whitening of small covariance matrices
    G = torch.randn(512, 256, 1024, device=device, generator=gen)
    cov = G @ G.transpose(1, 2) / 1024
    val, vec = torch.linalg.eigh(cov[:64])
    W = vec @ torch.diag_embed(val.clamp(min=1e-5).rsqrt()) @ vec.mT
    out = torch.einsum("bij,bjk->bik", W, G[:64])
    inv = torch.linalg.inv(cov)
    print(out.std().item(), torch.logdet(cov).mean().item(), torch.linalg.pinv(cov[:16]).abs().max().item(), inv.shape)
