"""A U-Net for segmentation, in plain PyTorch, with Adam."""

import torch
from switches import adam, applied, micro_batches, precision, through
from torch import nn
from torch.nn import functional as F

args = applied(batch=8, width=32, image=256)


class Twice(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.norm2 = nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after)

    def forward(self, x):
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class UNet(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.encoder = nn.ModuleList([Twice(3, w), Twice(w, 2 * w), Twice(2 * w, 4 * w), Twice(4 * w, 8 * w)])
        self.ups = nn.ModuleList(nn.ConvTranspose2d(2 * n, n, 2, 2) for n in (4 * w, 2 * w, w))
        self.decoder = nn.ModuleList([Twice(8 * w, 4 * w), Twice(4 * w, 2 * w), Twice(2 * w, w)])
        self.classes = nn.Conv2d(w, 21, 1)

    def forward(self, x):
        skips = []
        for part in self.encoder:
            x = through(part, args.apply, F.max_pool2d(x, 2) if skips else x)
            skips.append(x)
        skips.pop()
        for up, part in zip(self.ups, self.decoder, strict=True):
            x = through(part, args.apply, torch.cat([up(x), skips.pop()], 1))
        return self.classes(x)


model = UNet(args.width).cuda()
optimizer = adam(model.parameters(), args.apply)
for _ in range(3):
    images = torch.randn(args.batch, 3, args.image, args.image).cuda()
    masks = torch.randint(0, 21, (args.batch, args.image, args.image)).cuda()
    for image, mask in micro_batches(args.apply, images, masks):
        with precision(args.apply):
            loss = F.cross_entropy(model(image), mask)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
