"""MoCo v2 on synthetic crops (course project)."""

import argparse
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

ap = argparse.ArgumentParser()
ap.add_argument("-b", "--batch-size", type=int, default=256)
ap.add_argument("--moco-k", type=int, default=65536)
ap.add_argument("--moco-m", type=float, default=0.999)
ap.add_argument("--size", type=int, default=160)
ap.add_argument("--channels-last", action="store_true")
ap.add_argument("--compile", action="store_true")
args = ap.parse_args()

torch.manual_seed(3)
torch.backends.cudnn.benchmark = True


class Bottleneck(nn.Module):
    def __init__(self, cin, mid, stride=1):
        super().__init__()
        out = mid * 4
        self.conv1, self.bn1 = nn.Conv2d(cin, mid, 1, bias=False), nn.BatchNorm2d(mid)
        self.conv2, self.bn2 = nn.Conv2d(mid, mid, 3, stride, 1, bias=False), nn.BatchNorm2d(mid)
        self.conv3, self.bn3 = nn.Conv2d(mid, out, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.down = None
        if stride != 1 or cin != out:
            self.down = nn.Sequential(nn.Conv2d(cin, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        idt = x if self.down is None else self.down(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += idt
        return self.relu(y)


def resnet(blocks=(3, 4, 6, 3), dim=128):
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)]
    cin = 64
    for i, n in enumerate(blocks):
        for j in range(n):
            layers.append(Bottleneck(cin, 64 * 2**i, 2 if (j == 0 and i > 0) else 1))
            cin = 64 * 2**i * 4
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(cin, cin), nn.ReLU(True), nn.Linear(cin, dim)]
    return nn.Sequential(*layers)


class MoCo(nn.Module):
    def __init__(self, K, m, T=0.2, dim=128):
        super().__init__()
        self.K, self.m, self.T = K, m, T
        self.encoder_q = resnet(dim=dim)
        self.encoder_k = copy.deepcopy(self.encoder_q)
        for p in self.encoder_k.parameters():
            p.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(dim, K), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _update_key(self):
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            k.data = k.data * self.m + q.data * (1.0 - self.m)

    @torch.no_grad()
    def _enqueue(self, keys):
        ptr = int(self.queue_ptr)
        self.queue[:, ptr : ptr + keys.shape[0]] = keys.T
        self.queue_ptr[0] = (ptr + keys.shape[0]) % self.K

    def forward(self, im_q, im_k):
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self._update_key()
            idx = torch.randperm(im_k.shape[0], device=im_k.device)
            inv = torch.argsort(idx)
            k = F.normalize(self.encoder_k(im_k[idx]), dim=1)[inv]
        l_pos = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        logits = torch.cat([l_pos, l_neg], dim=1) / self.T
        labels = torch.zeros(logits.shape[0], dtype=torch.long).cuda()
        self._enqueue(k.float())
        return logits, labels


model = MoCo(args.moco_k, args.moco_m).cuda()
if args.channels_last:
    model = model.to(memory_format=torch.channels_last)
if args.compile:
    model.encoder_q = torch.compile(model.encoder_q)
opt = torch.optim.SGD(model.parameters(), 0.03, momentum=0.9, weight_decay=1e-4)
scaler = torch.amp.GradScaler("cuda")
crit = nn.CrossEntropyLoss().cuda()
for it in range(4):
    a = torch.randn(args.batch_size, 3, args.size, args.size).cuda(non_blocking=True)
    b = (a + 0.1 * torch.randn_like(a)).flip(-1)
    if args.channels_last:
        a, b = a.to(memory_format=torch.channels_last), b.to(memory_format=torch.channels_last)
    with torch.autocast("cuda", dtype=torch.float16):
        out, target = model(a, b)
        loss = crit(out, target)
    acc = (out.argmax(1) == target).float().mean().item()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    print(it, loss.item(), acc)
