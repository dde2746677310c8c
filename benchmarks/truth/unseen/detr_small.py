"""A small DETR: CNN backbone, nn.Transformer, Hungarian matching with scipy, and NMS by hand at evaluation."""

import argparse
import random

import torch
import torch.nn.functional as F
from torch import nn

try:
    from scipy.optimize import linear_sum_assignment
except ImportError:  # greedy, good enough to try things out

    def linear_sum_assignment(cost):
        rows, cols = [], []
        for j in range(cost.shape[1]):
            i = min((r for r in range(cost.shape[0]) if r not in rows), key=lambda r: cost[r, j])
            rows.append(i)
            cols.append(j)
        return rows, cols


def box_iou(a, b):
    area = lambda x: (x[:, 2] - x[:, 0]).clamp(0) * (x[:, 3] - x[:, 1]).clamp(0)
    lt, rb = torch.max(a[:, None, :2], b[:, :2]), torch.min(a[:, None, 2:], b[:, 2:])
    wh = (rb - lt).clamp(min=0)
    inter = wh[..., 0] * wh[..., 1]
    union = area(a)[:, None] + area(b) - inter
    return inter / union.clamp(min=1e-6), union


def giou(a, b):
    iou, union = box_iou(a, b)
    wh = (torch.max(a[:, None, 2:], b[:, 2:]) - torch.min(a[:, None, :2], b[:, :2])).clamp(min=0)
    hull = wh[..., 0] * wh[..., 1]
    return iou - (hull - union) / hull.clamp(min=1e-6)


def xyxy(b):
    c, s = b[..., :2], b[..., 2:]
    return torch.cat([c - s / 2, c + s / 2], -1)


class DETR(nn.Module):
    def __init__(self, classes=91, d=256, heads=8, enc=6, dec=6, queries=100):
        super().__init__()
        chans = [64, 128, 256, 512]
        layers, c = [nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(inplace=True)], 64
        for o in chans:
            layers += [
                nn.Conv2d(c, o, 3, 2, 1, bias=False),
                nn.BatchNorm2d(o),
                nn.ReLU(inplace=True),
                nn.Conv2d(o, o, 3, 1, 1, bias=False),
                nn.BatchNorm2d(o),
                nn.ReLU(inplace=True),
            ]
            c = o
        self.backbone = nn.Sequential(*layers)
        self.conv = nn.Conv2d(c, d, 1)
        self.transformer = nn.Transformer(d, heads, enc, dec, dim_feedforward=2048, batch_first=True)
        self.cls, self.box = nn.Linear(d, classes + 1), nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, 4))
        self.query = nn.Parameter(torch.rand(queries, d))
        self.row, self.col = nn.Parameter(torch.rand(64, d // 2)), nn.Parameter(torch.rand(64, d // 2))

    def forward(self, x, pad):
        h = self.conv(self.backbone(x))
        B, D, H, W = h.shape
        pos = torch.cat(
            [self.col[:W].unsqueeze(0).repeat(H, 1, 1), self.row[:H].unsqueeze(1).repeat(1, W, 1)], -1
        ).flatten(0, 1)
        m = F.interpolate(pad[:, None].float(), (H, W)).bool().flatten(1)
        out = self.transformer(
            h.flatten(2).transpose(1, 2) + pos,
            self.query.expand(B, -1, -1),
            src_key_padding_mask=m,
            memory_key_padding_mask=m,
        )
        return self.cls(out), self.box(out).sigmoid()


@torch.no_grad()
def match(logits, boxes, targets):
    res = []
    for l, b, t in zip(logits, boxes, targets):
        cost = 5 * torch.cdist(b, t["boxes"], p=1) - l.softmax(-1)[:, t["labels"]] - 2 * giou(xyxy(b), xyxy(t["boxes"]))
        i, j = linear_sum_assignment(cost.cpu().numpy())
        res.append((torch.as_tensor(i), torch.as_tensor(j)))
    return res


def nms(boxes, scores, thr):
    order, keep = scores.argsort(descending=True), []
    while order.numel() and len(keep) < 20:
        keep.append(order[0])
        iou, _ = box_iou(boxes[order[:1]], boxes[order[1:]])
        order = order[1:][iou[0] <= thr]
    return torch.stack(keep)


def batch_of(rng, n, big):
    sizes = [(rng.randint(big // 2, big), rng.randint(big // 2, big)) for _ in range(n)]
    H, W = max(s[0] for s in sizes), max(s[1] for s in sizes)
    x, pad, targets = torch.zeros(n, 3, H, W), torch.ones(n, H, W, dtype=torch.bool), []
    for i, (h, w) in enumerate(sizes):
        x[i, :, :h, :w] = torch.randn(3, h, w)
        pad[i, :h, :w] = False
        k = rng.randint(1, 30)
        targets.append({"labels": torch.randint(0, 91, (k,)).cuda(), "boxes": (torch.rand(k, 4) * 0.5 + 0.1).cuda()})
    return x.cuda(), pad.cuda(), targets


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--max-size", type=int, default=1024)
    ap.add_argument("--steps", type=int, default=5)
    ap.add_argument("--no-eval", action="store_true")
    a = ap.parse_args()
    torch.manual_seed(29)
    rng = random.Random(29)
    model = DETR().cuda()
    opt = torch.optim.AdamW(
        [
            {"params": model.backbone.parameters(), "lr": 1e-5},
            {"params": [p for n, p in model.named_parameters() if not n.startswith("backbone")]},
        ],
        lr=1e-4,
    )
    weight = torch.ones(92).cuda()
    weight[-1] = 0.1
    for s in range(a.steps):
        x, pad, targets = batch_of(rng, a.batch, a.max_size)
        logits, boxes = model(x, pad)
        idx = match(logits, boxes, targets)
        tc = torch.full(logits.shape[:2], 91, device="cuda")
        lb = torch.zeros((), device="cuda")
        for b, (i, j) in enumerate(idx):
            tc[b, i] = targets[b]["labels"][j]
            src, tgt = boxes[b, i], targets[b]["boxes"][j]
            lb = lb + F.l1_loss(src, tgt, reduction="sum") * 5 + 2 * (1 - torch.diag(giou(xyxy(src), xyxy(tgt)))).sum()
        loss = F.cross_entropy(logits.transpose(1, 2), tc, weight) + lb / sum(len(t["labels"]) for t in targets)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        opt.step()
        print(s, tuple(x.shape), loss.item())
    if not a.no_eval:
        model.eval()
        with torch.no_grad():
            x, pad, _ = batch_of(rng, a.batch, a.max_size)
            logits, boxes = model(x, pad)
            for l, b in zip(logits, boxes):
                score, lab = l.softmax(-1)[:, :-1].max(-1)
                sel = score > score.median()
                print(nms(xyxy(b[sel]), score[sel], 0.7).numel(), end=" ")
