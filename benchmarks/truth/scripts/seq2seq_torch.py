"""Train torch.nn.Transformer on random token pairs, with padding and causal masks."""
import argparse

import torch
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--dim", type=int, default=512)
p.add_argument("--layers", type=int, default=6)
p.add_argument("--batch", type=int, default=16)
p.add_argument("--src", type=int, default=200)
p.add_argument("--tgt", type=int, default=150)
p.add_argument("--dropout", type=float, default=0.1)
p.add_argument("--norm-first", action="store_true")
p.add_argument("--amp", choices=["no", "bf16", "fp16"], default="no")
p.add_argument("--optimizer", choices=["adamw", "adagrad", "rmsprop", "nadam"], default="adamw")
args = p.parse_args()
VOCAB = 12000


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(VOCAB, args.dim), nn.Embedding(VOCAB, args.dim)
        self.position = nn.Parameter(torch.zeros(1, 1024, args.dim))
        self.body = nn.Transformer(args.dim, 8, args.layers, args.layers, 4 * args.dim, args.dropout,
                                   batch_first=True, norm_first=args.norm_first)
        self.head = nn.Linear(args.dim, VOCAB)

    def forward(self, src, tgt, padding):
        causal = self.body.generate_square_subsequent_mask(tgt.shape[1], device=tgt.device)
        a = self.source(src) + self.position[:, :src.shape[1]]
        b = self.target(tgt) + self.position[:, :tgt.shape[1]]
        out = self.body(a, b, tgt_mask=causal, src_key_padding_mask=padding, memory_key_padding_mask=padding)
        return self.head(out)


model = Translator().cuda().train()
kinds = dict(adamw=torch.optim.AdamW, adagrad=torch.optim.Adagrad, rmsprop=torch.optim.RMSprop, nadam=torch.optim.NAdam)
optimizer = kinds[args.optimizer](model.parameters(), lr=1e-4)
dtype = dict(no=torch.float32, bf16=torch.bfloat16, fp16=torch.float16)[args.amp]
scaler = torch.amp.GradScaler("cuda", enabled=args.amp == "fp16")
for step in range(3):
    src = torch.randint(0, VOCAB, (args.batch, args.src), device="cuda")
    tgt = torch.randint(0, VOCAB, (args.batch, args.tgt + 1), device="cuda")
    padding = torch.arange(args.src, device="cuda")[None] >= torch.randint(args.src // 2, args.src, (args.batch, 1), device="cuda")
    with torch.autocast("cuda", dtype, enabled=args.amp != "no"):
        logits = model(src, tgt[:, :-1], padding)
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), tgt[:, 1:], label_smoothing=0.1)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(step, loss.item())
