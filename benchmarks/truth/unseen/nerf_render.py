"""Tiny NeRF: train on random rays, then render whole images in chunks (halves the chunk when memory runs out)."""

import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--N_rand", type=int, default=4096)
parser.add_argument("--N_samples", type=int, default=64)
parser.add_argument("--N_importance", type=int, default=128)
parser.add_argument("--netwidth", type=int, default=256)
parser.add_argument("--netchunk", type=int, default=1024 * 64)
parser.add_argument("--chunk", type=int, default=1024 * 32)
parser.add_argument("--H", type=int, default=200)
parser.add_argument("--W", type=int, default=200)
parser.add_argument("--no_reload", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
device = "cuda"


def embed(x, L):
    out = [x]
    for i in range(L):
        for fn in (torch.sin, torch.cos):
            out.append(fn(x * 2.0**i))
    return torch.cat(out, -1)


class NeRF(nn.Module):
    def __init__(self, D=8, W=256, skips=(4,)):
        super().__init__()
        self.skips = skips
        self.pts = nn.ModuleList([nn.Linear(63, W)] + [nn.Linear(W + 63 if i in skips else W, W) for i in range(D - 1)])
        self.view = nn.Linear(27 + W, W // 2)
        self.feat, self.alpha, self.rgb = nn.Linear(W, W), nn.Linear(W, 1), nn.Linear(W // 2, 3)

    def forward(self, pts, dirs):
        h = pts
        for i, l in enumerate(self.pts):
            h = F.relu(l(h))
            if i in self.skips:
                h = torch.cat([pts, h], -1)
        a = self.alpha(h)
        h = F.relu(self.view(torch.cat([self.feat(h), dirs], -1)))
        return torch.cat([torch.sigmoid(self.rgb(h)), a], -1)


def run_network(pts, viewdirs, fn):
    flat = embed(pts.reshape(-1, 3), 10)
    d = embed(viewdirs[:, None].expand(pts.shape).reshape(-1, 3), 4)
    outs = [fn(flat[i : i + args.netchunk], d[i : i + args.netchunk]) for i in range(0, flat.shape[0], args.netchunk)]
    return torch.cat(outs, 0).reshape(*pts.shape[:-1], 4)


def raw2outputs(raw, z, rays_d):
    dists = torch.cat([z[..., 1:] - z[..., :-1], torch.full_like(z[..., :1], 1e10)], -1) * rays_d[..., None, :].norm(
        dim=-1
    )
    alpha = 1.0 - torch.exp(-F.relu(raw[..., 3]) * dists)
    T = torch.cumprod(torch.cat([torch.ones((alpha.shape[0], 1), device=device), 1.0 - alpha + 1e-10], -1), -1)[:, :-1]
    w = alpha * T
    return (w[..., None] * raw[..., :3]).sum(-2), w


def sample_pdf(bins, weights, n):
    pdf = (weights + 1e-5) / (weights + 1e-5).sum(-1, keepdim=True)
    cdf = F.pad(pdf.cumsum(-1), (1, 0))
    u = torch.rand(*cdf.shape[:-1], n, device=device)
    inds = torch.searchsorted(cdf, u, right=True)
    lo, hi = (inds - 1).clamp(min=0), inds.clamp(max=cdf.shape[-1] - 1)
    g = torch.stack([lo, hi], -1)
    shape = [g.shape[0], g.shape[1], cdf.shape[-1]]
    c = torch.gather(cdf.unsqueeze(1).expand(shape), 2, g)
    b = torch.gather(bins.unsqueeze(1).expand(shape), 2, g)
    den = torch.where(c[..., 1] - c[..., 0] < 1e-5, torch.ones_like(c[..., 0]), c[..., 1] - c[..., 0])
    return b[..., 0] + (u - c[..., 0]) / den * (b[..., 1] - b[..., 0])


def render_rays(o, d):
    v = d / d.norm(dim=-1, keepdim=True)
    z = torch.linspace(2.0, 6.0, args.N_samples, device=device).expand(o.shape[0], args.N_samples)
    z = z + torch.rand_like(z) * (4.0 / args.N_samples)
    rgb0, w = raw2outputs(run_network(o[:, None] + d[:, None] * z[..., None], v, coarse), z, d)
    mid = 0.5 * (z[..., 1:] + z[..., :-1])
    zs = sample_pdf(mid, w[..., 1:-1], args.N_importance).detach()
    z, _ = torch.sort(torch.cat([z, zs], -1), -1)
    rgb, _ = raw2outputs(run_network(o[:, None] + d[:, None] * z[..., None], v, fine), z, d)
    return rgb, rgb0


coarse, fine = NeRF(W=args.netwidth).to(device), NeRF(W=args.netwidth).to(device)
opt = torch.optim.Adam([*coarse.parameters(), *fine.parameters()], lr=5e-4)
for i in range(5):
    o = torch.randn(args.N_rand, 3, device=device)
    d = torch.randn(args.N_rand, 3, device=device)
    target = torch.rand(args.N_rand, 3, device=device)
    rgb, rgb0 = render_rays(o, d)
    opt.zero_grad()
    loss = ((rgb - target) ** 2).mean() + ((rgb0 - target) ** 2).mean()
    loss.backward()
    opt.step()
    print("iter", i, "psnr", (-10.0 * torch.log10(loss)).item())

jj, ii = torch.meshgrid(torch.arange(args.H, device=device), torch.arange(args.W, device=device), indexing="ij")
dirs = (
    torch.stack([(ii - args.W * 0.5) / 150.0, -(jj - args.H * 0.5) / 150.0, -torch.ones_like(ii)], -1)
    .reshape(-1, 3)
    .float()
)
chunk = args.chunk
while True:
    try:
        with torch.no_grad():
            img = torch.cat(
                [
                    render_rays(torch.zeros_like(dirs[k : k + chunk]), dirs[k : k + chunk])[0]
                    for k in range(0, dirs.shape[0], chunk)
                ]
            )
        break
    except torch.cuda.OutOfMemoryError:
        if args.no_reload:
            raise
        chunk //= 2
        torch.cuda.empty_cache()
        print("out of memory, chunk ->", chunk)
print(img.view(args.H, args.W, 3).cpu().mean())
