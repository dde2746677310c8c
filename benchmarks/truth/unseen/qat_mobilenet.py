"""Quantisation-aware training by fake quantisation, with observers, on a MobileNet-like network."""

import argparse
import torch
import torch.nn as nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver, MovingAveragePerChannelMinMaxObserver


def act_fq():
    return FakeQuantize(observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8)


def weight_fq():
    return FakeQuantize(
        observer=MovingAveragePerChannelMinMaxObserver,
        quant_min=-128,
        quant_max=127,
        dtype=torch.qint8,
        qscheme=torch.per_channel_symmetric,
        ch_axis=0,
    )


class QConv(nn.Conv2d):
    def __init__(self, *args, **kw):
        super().__init__(*args, **kw)
        self.wq, self.aq = weight_fq(), act_fq()

    def forward(self, x):
        return self._conv_forward(self.aq(x), self.wq(self.weight), self.bias)


class InvertedResidual(nn.Module):
    def __init__(self, i, o, stride, expand, conv):
        super().__init__()
        h = i * expand
        self.use = stride == 1 and i == o
        self.conv = nn.Sequential(
            conv(i, h, 1, bias=False),
            nn.BatchNorm2d(h),
            nn.ReLU6(inplace=True),
            conv(h, h, 3, stride, 1, groups=h, bias=False),
            nn.BatchNorm2d(h),
            nn.ReLU6(inplace=True),
            conv(h, o, 1, bias=False),
            nn.BatchNorm2d(o),
        )

    def forward(self, x):
        return x + self.conv(x) if self.use else self.conv(x)


def mobilenet(conv):
    layers, c = [nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU6(inplace=True)], 32
    for t, o, n, s in [
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ]:
        for k in range(n):
            layers.append(InvertedResidual(c, o, s if k == 0 else 1, t, conv))
            c = o
    return nn.Sequential(
        *layers, nn.Conv2d(c, 1280, 1), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 1000)
    )


ap = argparse.ArgumentParser()
ap.add_argument("--batch", type=int, default=128)
ap.add_argument("--float", action="store_true", dest="plain")
ap.add_argument("--deterministic", action="store_true")
a = ap.parse_args()
torch.manual_seed(0)
if a.deterministic:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
net = mobilenet(nn.Conv2d if a.plain else QConv).cuda()
opt = torch.optim.RMSprop(net.parameters(), lr=0.045, momentum=0.9, weight_decay=4e-5)
for step in range(4):
    x, y = torch.randn(a.batch, 3, 224, 224, device="cuda"), torch.randint(0, 1000, (a.batch,), device="cuda")
    loss = nn.functional.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
net.eval()
if not a.plain:
    for m in net.modules():
        if isinstance(m, FakeQuantize):
            m.disable_observer()
with torch.no_grad():
    print(sum(net(torch.randn(a.batch, 3, 224, 224).to("cuda")).argmax(1).float().mean().item() for _ in range(2)))
