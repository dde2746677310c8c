"""Trains a tiny model on samples of a few lengths, with evaluations, clipping and accumulation."""

import argparse
import random

import torch
from torch import nn
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--longest", type=int, default=4)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--precision", default="fp32")
parser.add_argument(
    "--by-hand", action="store_true", help="gradients are set to None, and looked at, by the script itself"
)
parser.add_argument("--watch-gradients", action="store_true")
parser.add_argument("--leak", action="store_true")
parser.add_argument("--cap", type=float, default=0.0, metavar="MIB")
options = parser.parse_args()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(512, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True, dropout=0.0)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(128, 512)

    def forward(self, tokens):
        return self.head(self.layers(self.embed(tokens)))


if options.cap:
    torch.cuda.set_per_process_memory_fraction(options.cap * 2**20 / torch.cuda.mem_get_info()[1])
draw = random.Random(0)
lengths = [64 * draw.randint(1, options.longest) for _ in range(options.steps)]
loader = DataLoader(lengths, None, collate_fn=lambda length: torch.ones(4, length, dtype=torch.long))
model = Model().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
scaler = torch.amp.GradScaler("cuda", enabled=options.precision == "fp16")
kept = []
validation = DataLoader([0, 1], None, collate_fn=lambda _: torch.ones(8, 128, dtype=torch.long))
for step, batch in enumerate((batch for _ in range(options.epochs) for batch in loader), 1):
    batch = batch.cuda()
    with torch.autocast("cuda", torch.float16, enabled=options.precision == "fp16"):
        logits = model(batch)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten()) / options.accumulate
    scaler.scale(loss).backward()
    if options.leak:
        kept.append(logits.detach())
    if options.by_hand:
        norms = [parameter.grad.norm() for parameter in model.parameters()]
    if options.watch_gradients:
        norms = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    if step % options.accumulate == 0:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        if options.by_hand:
            for parameter in model.parameters():
                parameter.grad = None
        else:
            optimizer.zero_grad()
    if step % 5 == 0:
        model.eval()
        for batch in validation:
            with torch.no_grad():
                scores = model(batch.cuda()).argmax(-1)
        del scores
        model.train()
    print("step", step, flush=True)
