"""Fourier neural operator for Navier-Stokes, rolled out in time."""

import argparse
from timeit import default_timer
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
np.random.seed(0)


class SpectralConv2d(nn.Module):
    def __init__(self, in_channels, out_channels, modes1, modes2):
        super(SpectralConv2d, self).__init__()
        self.out_channels, self.modes1, self.modes2 = out_channels, modes1, modes2
        scale = 1 / (in_channels * out_channels)
        self.weights1 = nn.Parameter(
            scale
            * torch.rand(
                in_channels,
                out_channels,
                modes1,
                modes2,
                dtype=torch.cdouble if torch.get_default_dtype() == torch.float64 else torch.cfloat,
            )
        )
        self.weights2 = nn.Parameter(
            scale
            * torch.rand(
                in_channels,
                out_channels,
                modes1,
                modes2,
                dtype=torch.cdouble if torch.get_default_dtype() == torch.float64 else torch.cfloat,
            )
        )

    def compl_mul2d(self, input, weights):
        return torch.einsum("bixy,ioxy->boxy", input, weights)

    def forward(self, x):
        x_ft = torch.fft.rfft2(x)
        out_ft = torch.zeros(
            x.shape[0], self.out_channels, x.size(-2), x.size(-1) // 2 + 1, dtype=x_ft.dtype, device=x.device
        )
        out_ft[:, :, : self.modes1, : self.modes2] = self.compl_mul2d(
            x_ft[:, :, : self.modes1, : self.modes2], self.weights1
        )
        out_ft[:, :, -self.modes1 :, : self.modes2] = self.compl_mul2d(
            x_ft[:, :, -self.modes1 :, : self.modes2], self.weights2
        )
        return torch.fft.irfft2(out_ft, s=(x.size(-2), x.size(-1)))


class FNO2d(nn.Module):
    def __init__(self, modes, width, layers=4, t_in=10):
        super().__init__()
        self.p = nn.Linear(t_in + 2, width)
        self.convs = nn.ModuleList([SpectralConv2d(width, width, modes, modes) for _ in range(layers)])
        self.ws = nn.ModuleList([nn.Conv2d(width, width, 1) for _ in range(layers)])
        self.norm = nn.InstanceNorm2d(width)
        self.q1, self.q2 = nn.Linear(width, width * 4), nn.Linear(width * 4, 1)

    def forward(self, x):
        x = torch.cat((x, self.get_grid(x.shape, x.device, x.dtype)), dim=-1)
        x = self.p(x).permute(0, 3, 1, 2)
        for i, (c, w) in enumerate(zip(self.convs, self.ws)):
            x = self.norm(c(self.norm(x))) + w(x)
            if i < len(self.ws) - 1:
                x = F.gelu(x)
        return self.q2(F.gelu(self.q1(x.permute(0, 2, 3, 1))))

    def get_grid(self, shape, device, dtype):
        b, sx, sy = shape[:3]
        gx = torch.tensor(np.linspace(0, 1, sx), dtype=dtype).reshape(1, sx, 1, 1).repeat([b, 1, sy, 1])
        gy = torch.tensor(np.linspace(0, 1, sy), dtype=dtype).reshape(1, 1, sy, 1).repeat([b, sx, 1, 1])
        return torch.cat((gx, gy), dim=-1).to(device)


class LpLoss(object):
    def __call__(self, x, y):
        n = x.size()[0]
        return (torch.norm(x.reshape(n, -1) - y.reshape(n, -1), 2, 1) / torch.norm(y.reshape(n, -1), 2, 1)).sum()


ap = argparse.ArgumentParser()
ap.add_argument("--S", type=int, default=128)
ap.add_argument("--T", type=int, default=10)
ap.add_argument("--batch", type=int, default=16)
ap.add_argument("--modes", type=int, default=16)
ap.add_argument("--width", type=int, default=32)
ap.add_argument("--double", action="store_true")
ap.add_argument("--detach", action="store_true", help="pushforward trick: no gradient through the rollout")
args = ap.parse_args()
if args.double:
    torch.set_default_dtype(torch.float64)
model = FNO2d(args.modes, args.width).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
myloss = LpLoss()
data = torch.randn(args.batch * 3, args.S, args.S, 10 + args.T)
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(data[..., :10], data[..., 10:]), batch_size=args.batch, shuffle=True
)
for ep in range(1):
    model.train()
    t1 = default_timer()
    train_l2 = 0
    for xx, yy in loader:
        loss = 0
        xx, yy = xx.cuda(), yy.cuda()
        for t in range(args.T):
            im = model(xx)
            loss += myloss(im, yy[..., t : t + 1])
            pred = im if t == 0 else torch.cat((pred, im), -1)
            xx = torch.cat((xx[..., 1:], im.detach() if args.detach else im), dim=-1)
        train_l2 += loss.item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        for xx, yy in loader:
            xx, yy = xx.cuda(), yy.cuda()
            for t in range(args.T):
                im = model(xx)
                xx = torch.cat((xx[..., 1:], im), dim=-1)
    print(ep, default_timer() - t1, train_l2)
