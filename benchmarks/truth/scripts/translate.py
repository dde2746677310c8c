"""nn.Transformer for translation: source and target, padding masks, causal mask."""

import argparse

import torch
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--dim", type=int, default=512)
p.add_argument("--layers", type=int, default=6)
p.add_argument("--batch", type=int, default=64)
p.add_argument("--seq", type=int, default=128)
p.add_argument("--amp", action="store_true")
args = p.parse_args()

embed = nn.Embedding(32000, args.dim).cuda()
net = nn.Transformer(args.dim, 8, args.layers, args.layers, 4 * args.dim, batch_first=True).cuda()
head = nn.Linear(args.dim, 32000).cuda()
parameters = [*embed.parameters(), *net.parameters(), *head.parameters()]
optimizer = torch.optim.Adam(parameters, lr=1e-4)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
causal = nn.Transformer.generate_square_subsequent_mask(args.seq).cuda()
for step in range(3):
    source, target = (torch.randint(1, 32000, (args.batch, args.seq)).cuda() for _ in range(2))
    padding = torch.zeros(args.batch, args.seq, dtype=torch.bool, device="cuda")
    padding[:, -args.seq // 8 :] = True
    with torch.autocast("cuda", torch.bfloat16, enabled=args.amp):
        y = net(embed(source), embed(target), tgt_mask=causal, src_key_padding_mask=padding, memory_key_padding_mask=padding)
        loss = nn.functional.cross_entropy(head(y).flatten(0, 1), target.flatten(), label_smoothing=0.1, ignore_index=0)
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    print(step, loss.item())
