"""Recurrent networks: a language model, and a classifier over packed sequences."""

import argparse

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

p = argparse.ArgumentParser()
p.add_argument("--cell", default="lstm", choices=["lstm", "gru", "rnn"])
p.add_argument("--hidden", type=int, default=1024)
p.add_argument("--layers", type=int, default=2)
p.add_argument("--batch", type=int, default=64)
p.add_argument("--seq", type=int, default=128)
p.add_argument("--both-ways", action="store_true")
p.add_argument("--dropout", type=float, default=0.0)
p.add_argument("--packed", action="store_true")
p.add_argument("--amp", action="store_true")
args = p.parse_args()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20000, args.hidden)
        kind = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}[args.cell]
        self.rnn = kind(args.hidden, args.hidden, args.layers, batch_first=True, dropout=args.dropout,
                        bidirectional=args.both_ways)
        self.head = nn.Linear(args.hidden * (1 + args.both_ways), 20000)

    def forward(self, ids, lengths):
        x = self.embed(ids)
        if args.packed:
            x = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y, _ = self.rnn(x)
        if args.packed:
            y, _ = pad_packed_sequence(y, batch_first=True)
        return self.head(y)


model = Net().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(3):
    ids = torch.randint(0, 20000, (args.batch, args.seq)).cuda()
    lengths = torch.linspace(args.seq // 2, args.seq, args.batch).long()
    with torch.autocast("cuda", torch.bfloat16, enabled=args.amp):
        logits = model(ids, lengths)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, : logits.shape[1]].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    print(step, loss.item())
