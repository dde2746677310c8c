"""A network that warps its features: optical flow by grid_sample, deformed step by step."""
import argparse

import torch
import torch.nn.functional as F
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--batch", type=int, default=8)
p.add_argument("--image", type=int, default=256)
p.add_argument("--rounds", type=int, default=6)
p.add_argument("--corners", action="store_true", help="align_corners=True")
p.add_argument("--border", default="zeros", choices=["zeros", "border", "reflection"])
p.add_argument("--amp", action="store_true")
args = p.parse_args()


def warp(features, flow):
    b, _, h, w = features.shape
    base = F.affine_grid(torch.eye(2, 3, device="cuda").expand(b, 2, 3), (b, 1, h, w), align_corners=args.corners)
    return F.grid_sample(features, base + flow.permute(0, 2, 3, 1).to(base.dtype), padding_mode=args.border, align_corners=args.corners)


class Flow(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(3, width, 7, 2, 3), nn.InstanceNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, 1, 1))
        self.update = nn.Sequential(nn.Conv2d(2 * width + 2, 128, 3, 1, 1), nn.ReLU(), nn.Conv2d(128, 128, 3, 1, 1), nn.ReLU())
        self.flow = nn.Conv2d(128, 2, 3, 1, 1)

    def forward(self, first, second):
        a, b = self.encode(first), self.encode(second)
        flow, flows = torch.zeros(len(a), 2, *a.shape[2:], device=a.device), []
        for _ in range(args.rounds):
            moved = warp(b.float(), flow.detach())
            flow = flow + 0.1 * self.flow(self.update(torch.cat([a, moved.to(a.dtype), flow], 1))).float()
            flows.append(F.interpolate(flow, scale_factor=2, mode="bilinear", align_corners=args.corners))
        return flows


torch.manual_seed(0)
model = Flow().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(3):
    first, second = torch.rand(2, args.batch, 3, args.image, args.image).cuda()
    with torch.autocast("cuda", torch.bfloat16, enabled=args.amp):
        flows = model(first, second)
    loss = sum(0.8 ** (len(flows) - i) * F.l1_loss(warp(second, flow), first) for i, flow in enumerate(flows))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item(), torch.cuda.max_memory_allocated() // 2**20)
